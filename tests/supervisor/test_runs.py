from __future__ import annotations

import asyncio
import json
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.errors import Conflict
from carrel.supervisor import runs
from carrel.supervisor.http import HttpConnection, HttpRequest, HttpResponse, HttpRouter, json_response
from carrel.supervisor.runs import Runs


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abcd"))), st.integers(1, 4))
def test_what_is_said_not_to_have_begun_never_begins(steps: list[tuple[bool, str]], most: int) -> None:
    known, begun, off = Runs(), set(), set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "MOST", most)
        for begins, name in steps:
            if begins:
                try:
                    known.begin(name)
                    assert name not in off
                    begun.add(name)
                except Conflict:
                    assert name in off
                continue
            said = known.void(name)
            assert said is not True or name in begun
            if said is False:
                assert name not in begun
                off.add(name)
            if len(begun) <= most and len(off) < most:
                assert said is (name in begun)


async def test_requests_of_a_run() -> None:
    """A request that lies in a socket while another asks for its run is refused."""
    runs = Runs()
    router, handled = HttpRouter(runs.begin), []

    async def handle(request: HttpRequest) -> HttpResponse:
        handled.append(request.run)
        return json_response({})

    router.add("POST", "/act", handle)
    runs.routes(router)
    tasks: set[asyncio.Task[None]] = set()
    ours, theirs = socket.socketpair()
    await asyncio.get_running_loop().connect_accepted_socket(lambda: HttpConnection(router, tasks), theirs)
    reader, writer = await asyncio.open_unix_connection(sock=ours)

    async def ask(path: str, run: str | None) -> tuple[int, dict[str, object]]:
        head = "" if run is None else f"carrel-run: {run}\r\n"
        writer.write(f"POST {path} HTTP/1.1\r\n{head}content-length: 0\r\n\r\n".encode())
        answer = await reader.readuntil(b"\r\n\r\n")
        size = int(answer.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        return int(answer.split()[1]), json.loads(await reader.readexactly(size))

    assert await ask("/act", "one") == (200, {})
    assert await ask("/act", None) == (200, {})
    assert await ask("/absent", "two") != (200, {})
    assert await ask("/runs/one/void", None) == (200, {"begun": True})
    assert await ask("/runs/two/void", None) == (200, {"begun": False})
    status, problem = await ask("/act", "two")
    assert (status, problem["code"]) == (409, "conflict")
    assert await ask("/act", "one") == (200, {}), "what was begun goes on"
    assert await ask("/runs/two/void", None) == (200, {"begun": False}), "it may be asked again"
    assert handled == ["one", None, "one"]
    writer.close()
    await writer.wait_closed()
    await asyncio.gather(*tasks, return_exceptions=True)
