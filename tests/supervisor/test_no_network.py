"""What tools are told in a sandbox that has no network."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket

import pytest
from tests.support.sandboxes import KINDS, House, until

from carrel.isolation import rootfs
from carrel.supervisor import environment, no_network

isolated = pytest.mark.skipif("namespace" not in KINDS, reason="this host cannot make such sandboxes")


def test_connect_is_refused_with_the_reason_in_the_status_line() -> None:
    status, _, rest = no_network.answer(b"CONNECT docs.example.org:443 HTTP/1.1\r\n\r\n").partition(b"\r\n")
    assert status.startswith(b"HTTP/1.1 403 Forbidden (this sandbox has no network: start it with network='allowlist'")
    refusal = json.loads(rest.partition(b"\r\n\r\n")[2])
    assert (refusal["code"], refusal["operation"], refusal["retry"]) == ("denied_by_policy", "network", False)
    assert refusal["reason"] == "this sandbox has no network" and "network='allowlist'" in refusal["hint"]


def test_head_is_refused_without_a_body() -> None:
    head, _, body = no_network.answer(b"HEAD http://docs.example.org/ HTTP/1.1\r\n\r\n").partition(b"\r\n\r\n")
    assert b"Content-Length: " in head and body == b""


def test_socks_is_refused() -> None:
    assert no_network.answer(b"\x05\x01\x00") == b"\x05\xff"


def test_package_page_names_a_file_whose_version_tells_the_reason() -> None:
    page = no_network.answer(b"GET /simple/six/ HTTP/1.1\r\nHost: x\r\n\r\n")
    assert page.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b'href="/files/six-0+this.sandbox.has.no.network.tar.gz"' in page


@pytest.mark.parametrize("name", [b'"><script>', b"a/../b", b"%22", b"a" * 201, b""])
def test_package_page_repeats_nothing_but_plain_names(name: bytes) -> None:
    assert no_network.answer(b"GET /simple/%s/ HTTP/1.1\r\n\r\n" % name).startswith(b"HTTP/1.1 403 ")


def test_the_root_has_what_the_variables_name() -> None:
    made = {step.target for step in rootfs.base_plan({}) if isinstance(step, rootfs.TextFile)}
    assert f"{environment.CURL_OFFLINE}/.curlrc" in made and f"{environment.CURL_GOVERNED}/.curlrc" in made
    assert environment.APT_CONFIG in made


async def test_connections_beyond_the_limit_are_cut_and_later_ones_are_answered() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    server = await no_network.refuse_all(listener)
    async with server:
        idle = [await _connect(listener) for _ in range(2 * no_network.MOST_OPEN)]
        await until(lambda: sum(map(_is_cut, idle)) == no_network.MOST_OPEN)
        for each in idle:
            each.close()
        await until(lambda: _is_answered(listener))


async def _connect(listener: socket.socket) -> socket.socket:
    connection = socket.socket()
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, listener.getsockname())
    return connection


async def _is_answered(listener: socket.socket) -> bool:
    loop = asyncio.get_running_loop()
    with await _connect(listener) as connection:
        try:
            await loop.sock_sendall(connection, b"GET http://docs.example.org/ HTTP/1.1\r\n\r\n")
            return b"this sandbox has no network" in await loop.sock_recv(connection, 1000)
        except ConnectionError:
            return False


def _is_cut(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@isolated
@pytest.mark.parametrize(
    ("program", "command"),
    [
        ("curl", "curl -sS https://docs.example.org/"),
        ("curl", "curl -sS http://docs.example.org/"),
        ("git", "git clone https://docs.example.org/x.git /tmp/x"),
        ("pip", "python3 -m pip install --target /tmp/x six"),
        ("pip", "python3 -m pip install --target /tmp/x six==1.16"),
        ("npm", "cd /tmp && npm install left-pad"),
        ("apt-get", "apt-get update"),
        ("wget", "wget -O- https://docs.example.org/"),
        ("python3", "python3 -c \"import urllib.request as r; r.urlopen('https://docs.example.org/')\""),
    ],
)
async def test_tools_report_that_there_is_no_network(houses: dict[str, House], program: str, command: str) -> None:
    if not shutil.which(program) or (program == "apt-get" and not os.path.isdir("/etc/apt/sources.list.d")):
        pytest.skip(f"this host has no {program}")
    house = House("namespace", houses["namespace"].directory)
    async with house.box() as box:
        result = await box.supervisor.run(command, timeout=60)
        said = (result["stdout"] + result["stderr"]).replace(".", " ").replace("-", " ")
        assert not result["timed_out"], said
        assert "this sandbox has no network" in said, said
    await house.provider.close()
