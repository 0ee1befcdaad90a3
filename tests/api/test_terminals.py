from __future__ import annotations

import asyncio
import json
from contextlib import AbstractAsyncContextManager

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus

from carrel.server import RunningServer


def terminal(server: RunningServer, box: str, query: str = "") -> AbstractAsyncContextManager[ClientConnection]:
    url = server.url.replace("http", "ws") + box + "/terminals" + query
    return connect(url, additional_headers={"authorization": f"Bearer {server.token}"}, proxy=None)


async def until(socket: ClientConnection, wanted: bytes) -> bytes:
    seen = b""
    async with asyncio.timeout(20):
        while wanted not in seen:
            message = await socket.recv()
            assert isinstance(message, bytes)
            seen += message
    return seen


async def test_a_terminal(server: RunningServer, box: str) -> None:
    async with terminal(server, box, "?rows=30&cols=100&command=sh") as socket:
        await socket.send(b"stty size\n")
        await until(socket, b"30 100")
        await socket.send(json.dumps({"resize": {"rows": 40, "cols": 120}}))
        await socket.send(b"stty size\n")
        await until(socket, b"40 120")
        await socket.send(b"exit 7\n")
        async with asyncio.timeout(20):
            while isinstance(message := await socket.recv(), bytes):
                pass
        assert json.loads(message)["exit"]["exit_code"] == 7
        await socket.wait_closed()
        assert socket.close_code == 1000


async def test_it_dies_with_the_socket(server: RunningServer, http: httpx.AsyncClient, box: str) -> None:
    async with terminal(server, box, "?command=sleep%20999") as socket:
        assert [each["running"] for each in (await http.get(f"{box}/commands")).json()["items"]] == [True]
        await socket.close()
    async with asyncio.timeout(10):
        while any(each["running"] for each in (await http.get(f"{box}/commands")).json()["items"]):
            await asyncio.sleep(0.02)


async def test_nonsense_is_told_of(server: RunningServer, box: str) -> None:
    async with terminal(server, box, "?command=sleep%20999") as socket:
        await socket.send("resize please")
        async with asyncio.timeout(20):
            while isinstance(message := await socket.recv(), bytes):
                pass
        assert json.loads(message)["error"]["field"] == "resize"
        await socket.wait_closed()
        assert socket.close_code == 1008


@pytest.mark.parametrize(("path", "status"), [("/v1/sandboxes/absent", 404), ("", 400)])
async def test_refusals_come_before_the_socket_opens(server: RunningServer, box: str, path: str, status: int) -> None:
    with pytest.raises(InvalidStatus) as caught:
        async with terminal(server, path or box, "" if path else "?rows=0"):
            pass
    assert caught.value.response.status_code == status


async def test_the_token_is_needed_and_may_come_as_a_subprotocol(server: RunningServer, box: str) -> None:
    url = server.url.replace("http", "ws") + box + "/terminals?command=sh"
    for bad in (url, f"{url}&token={server.token}"):
        with pytest.raises(InvalidStatus) as caught:
            async with connect(bad, proxy=None):
                pass
        assert caught.value.response.status_code == 401
    offered = ["carrel", f"carrel.token.{server.token}"]
    async with connect(url, subprotocols=offered, proxy=None) as socket:  # type: ignore[arg-type]
        assert socket.subprotocol == "carrel"
        await socket.send(b"echo $((40+2))\n")
        await until(socket, b"42")
