"""Callers without a token who try to make the server useless for everybody else. Bounded in number, size and time."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.support.servers import Server, serving

from carrel import Client
from carrel.connections import MAX_HEAD

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


NAMES = (
    "Host", "Origin", "Authorization", "Carrel-Wait", "Carrel-Approval", "Content-Length", "Content-Type", "Connection",
    "Sec-WebSocket-Protocol", "Sec-WebSocket-Key", "Upgrade", "X-Request-Id", "Last-Event-ID", "Range", "Accept",
    "Transfer-Encoding", "Expect", "Cookie", "If-None-Match", "X-Forwarded-For",
)  # fmt: skip
WORDS = (
    b"http://[", b"localhost", b"127.0.0.1:7070", b"[::1]", b"Bearer carrel_x", b"upgrade", b"websocket", b"chunked",
    b"carrel, carrel.token.x", b"100-continue", b"-1", b"1e400", b"nan", b"99999999999999999999", b"bytes=9-1", b"%",
)  # fmt: skip
VALUES = st.sampled_from(WORDS) | st.binary(max_size=40).map(lambda value: value.translate(None, b"\r\n"))
PARTS = st.sampled_from(
    [b"v1", b"sandboxes", b"files", b"content", b"audit", b"%ff", b"%00", b"..", b"[", b"?path=", b":"]
)
PATHS = st.lists(PARTS | st.binary(max_size=8), max_size=6).map(lambda parts: b"/" + b"/".join(parts))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([b"GET", b"POST", b"PUT", b"DELETE", b"HEAD", b"OPTIONS", b"PATCH", b"CONNECT", b"FOO"]),
    PATHS.map(lambda path: path.translate(None, b"\r\n ")),
    st.lists(st.tuples(st.sampled_from(NAMES), VALUES), max_size=6),
    st.booleans(),
)
@example(b"GET", b"/v1/sandboxes", [("Origin", b"http://[")], False)
def test_no_header_makes_the_server_fail(
    small: Server, method: bytes, path: bytes, headers: list[tuple[str, bytes]], known: bool
) -> None:
    token = (small.data_dir / "token").read_text().strip()
    head = method + b" " + path + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Authorization: Bearer {token}\r\n".encode() if known else b""
    head += b"".join(name.encode() + b": " + value + b"\r\n" for name, value in headers)
    with connect(small) as connection:
        connection.sendall(head + b"\r\n")
        if any(name in {"Content-Length", "Transfer-Encoding", "Upgrade", "Connection"} for name, _ in headers):
            connection.shutdown(socket.SHUT_WR)  # such a request may be about something that never comes
        answer = received(connection)
    assert not answer.startswith(b"HTTP/1.1 5"), answer
    assert "Traceback" not in (small.data_dir.parent / "log").read_text()
