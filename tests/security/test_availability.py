"""Callers without a token who try to make the server useless for everybody else. Bounded in number, size and time."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest

from carrel import Client
from carrel.connections import MAX_HEAD
from servers import Server, serving

FILES = 512
IDLE = 700


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """A server that may have few files open."""
    with serving(user=False, open_files=FILES) as server:
        yield server


def connect(server: Server) -> socket.socket:
    address = urlsplit(server.client.url)
    return socket.create_connection((address.hostname or "", address.port or 0), timeout=60)


def received(connection: socket.socket) -> bytes:
    """All that the server sends until it closes."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionError:
        pass
    return b"".join(parts)


def memory(pid: int) -> int:
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))


def test_endless_heads_cost_no_memory_and_are_refused(small: Server) -> None:
    before = memory(small.pid)
    with ExitStack() as stack:
        attackers = [stack.enter_context(connect(small)) for _ in range(4)]
        for attacker in attackers:
            attacker.sendall(b"GET / HTTP/1.1\r\nx: ")
        sent = 0
        try:
            for _ in range(256):  # at most 64 MiB in all
                for attacker in attackers:
                    attacker.sendall(b"a" * 65536)
                    sent += 65536
        except ConnectionError:
            pass
        assert small.client.host() is not None
        assert sent < 64 * 1024 * 1024, "nobody stopped them"
        assert memory(small.pid) - before < 32 * 1024 * 1024
    with connect(small) as attacker:
        attacker.sendall(b"GET / HTTP/1.1\r\nx: " + b"a" * (2 * MAX_HEAD))
        head, _, body = received(attacker).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431 ")
        assert json.loads(body)["code"] == "too_large"


def test_idle_connections_keep_nobody_out(small: Server) -> None:
    assert IDLE > FILES
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(small)) for _ in range(IDLE)]
        with small.client.sandbox() as box:
            assert box.commands.run("echo here").stdout == "here\n"
        assert received(idle[0]) == b"", "the oldest made way"
        with connect(small) as newcomer:
            newcomer.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            assert received(newcomer).startswith(b"HTTP/1.1 200 ")


def test_made_up_tokens_do_not_lock_out_real_ones(small: Server) -> None:
    """A hundred connections show a made-up token each time, while a token that was never shown before is used."""
    ask = "GET /v1/sandboxes HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer carrel_{}\r\n\r\n"
    with ExitStack() as stack:
        attackers = [stack.enter_context(connect(small)) for _ in range(100)]
        for turn in range(5):
            for number, attacker in enumerate(attackers):
                attacker.sendall(ask.format(f"{turn}-{number}").encode())
            made = small.client.tokens.create(f"real-{turn}", kind="agent", scopes=["read"])
            with Client(small.client.url, made.token) as real:
                assert list(real.sandboxes()) == []
            for attacker in attackers:
                assert attacker.recv(65536).startswith(b"HTTP/1.1 401 ")
