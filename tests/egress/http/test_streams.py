"""Messages read piece by piece from what comes in any pieces; with TLS on real sockets in test_inspecting.py."""

from __future__ import annotations

import asyncio
import socket
import ssl
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.egress.access import AccessRefused
from carrel.egress.http.authority import Authority, make_authority
from carrel.egress.http.messages import chunk, read_response
from carrel.egress.http.streams import Body, TlsStream, accept_tls, begin_tls
from carrel.egress.sockets import Ended

AUTHORITY = Authority(make_authority("s1"))


async def reading(pieces: list[bytes], kind: str) -> tuple[bytes, bytes]:
    """A body of a kind in such pieces, and what is left behind it."""
    heads = {
        "length": b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n",
        "chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        "end": b"HTTP/1.1 200 OK\r\n\r\n",
    }
    reader = asyncio.StreamReader()
    stream = TlsStream(reader, None, lambda: None)  # type: ignore[arg-type]
    body = Body(stream, read_response(heads[kind]), lambda _: None)
    found = b""

    async def feed() -> None:
        for piece in pieces:
            reader.feed_data(piece)
            await asyncio.sleep(0)
        reader.feed_eof()

    async with asyncio.TaskGroup() as group:
        group.create_task(feed())
        while piece := await body.piece():
            found += piece
        assert await body.piece() == b""
    return found, stream.rest + await reader.read()


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({min(place, len(data)) for place in places} | {0, len(data)})
    return [data[start:end] for start, end in pairwise(edges)]


@given(st.lists(st.integers(0, 60), max_size=10), st.sampled_from(["length", "chunks", "end"]))
def test_a_body_is_the_same_in_all_pieces(places: list[int], kind: str) -> None:
    data, rest = b"0123456789", b"HTTP/1.1 and on"
    wire = {"length": data, "chunks": chunk(data[:3]) + chunk(data[3:]) + chunk(b""), "end": data}[kind]
    found = asyncio.run(reading(cut(wire + rest, places), kind))
    assert found == ((data + rest, b"") if kind == "end" else (data, rest))


@pytest.mark.parametrize(
    ("wire", "kind", "error"),
    [(b"012", "length", Ended), (b"5\r\n0", "chunks", Ended), (b"x\r\n", "chunks", AccessRefused)],
)
async def test_a_body_that_is_cut_or_odd_is_not_taken_for_a_whole_one(
    wire: bytes, kind: str, error: type[Exception]
) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        await reading([wire], kind)
    assert isinstance(raised.value.exceptions[0], error)


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    for each in (ours, theirs):
        each.setblocking(False)
    return ours, theirs


async def test_tls_leaves_the_sockets_to_their_owner() -> None:
    moved = []
    context = ssl.create_default_context(cadata=AUTHORITY.certificate)
    ours, theirs = pair()
    with ours, theirs:
        client, server = await asyncio.gather(
            begin_tls(ours, context, "a.test", lambda: moved.append(1)),
            accept_tls(theirs, AUTHORITY.context("a.test"), lambda: None),
        )
        await client.write(b"GET / HTTP/1.1\r\n\r\nrest")
        assert await server.head() == b"GET / HTTP/1.1\r\n\r\n"
        assert server.rest == b"rest"
        assert moved
        await asyncio.gather(client.finish(), server.finish())
        assert ours.fileno() > 0
        assert theirs.fileno() > 0
        assert await server.more() is False
        client.abort()


async def test_a_head_that_ends_early_or_never() -> None:
    for data, ended in ((b"", None), (b"GET /", Ended), (b"x" * 70_000, AccessRefused)):
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        stream = TlsStream(reader, None, lambda: None)  # type: ignore[arg-type]
        if ended is None:
            assert await stream.head() is None
        else:
            with pytest.raises(ended):
                await stream.head()


async def test_a_handshake_that_fails_leaves_nothing() -> None:
    context = ssl.create_default_context(cadata=AUTHORITY.certificate)
    ours, theirs = pair()
    with ours, theirs:
        accepting = asyncio.ensure_future(accept_tls(theirs, AUTHORITY.context("a.test"), lambda: None))
        with pytest.raises(ssl.SSLCertVerificationError):
            await begin_tls(ours, context, "b.test", lambda: None)
        ours.close()
        (accepted,) = await asyncio.gather(accepting, return_exceptions=True)
        if isinstance(accepted, TlsStream):
            accepted.abort()
    ours, theirs = pair()
    with ours, theirs:
        task = asyncio.ensure_future(accept_tls(theirs, AUTHORITY.context("a.test"), lambda: None))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
