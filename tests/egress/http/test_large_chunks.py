"""Bodies in chunks over connections with little room: all of them arrives, wherever the pieces are cut."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest
from tests.support import loops

from carrel.egress.http.messages import chunk, read_request
from carrel.egress.http.streams import Body, SocketStream
from carrel.egress.sockets import send

BODY = bytes(range(256)) * 16_000
NEXT = b"GET / HTTP/1.1\r\n"
HEAD = read_request(b"POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n")


@pytest.fixture(params=[None, 65536])
def narrow(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    if request.param is not None:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, request.param)
    for each in (ours, theirs):
        each.setblocking(False)
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("size", [999, 4093, 300_000])
@loops.each
async def test_all_of_it_arrives_and_nothing_after_it_is_used(
    narrow: tuple[socket.socket, socket.socket], size: int
) -> None:
    ours, theirs = narrow
    written = b"".join(chunk(BODY[at : at + size]) for at in range(0, len(BODY), size)) + chunk(b"")
    sending = asyncio.ensure_future(send(theirs, written + NEXT))
    counted: list[int] = []
    async with asyncio.timeout(60):
        stream = SocketStream(ours)
        body, got = Body(stream, HEAD, counted.append), b""
        while piece := await body.piece():
            got += piece
        await sending
        while len(stream.rest) < len(NEXT):
            await stream.more()
    assert got == BODY
    assert sum(counted) == len(written)
    assert stream.rest == NEXT
