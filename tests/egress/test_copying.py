from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.support import loops

from carrel.egress import copying
from carrel.egress.access import Access, AccessRefused
from carrel.egress.copying import copy, tunnel
from carrel.egress.outbound.budget import Budget, Meter
from carrel.egress.outbound.rules import EgressLimits
from carrel.egress.sockets import Ended

Pair = tuple[socket.socket, socket.socket]


def connected() -> Pair:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    ours.setblocking(False)
    theirs.setblocking(False)
    return ours, theirs


@asynccontextmanager
async def between(
    limits: EgressLimits | None = None, idle_s: float = 60
) -> AsyncIterator[tuple[Pair, asyncio.Task[None], Access]]:
    """The far ends of a tunnel that runs: the client's and the server's."""
    client, client_end = connected()
    upstream, server_end = connected()
    access = Access("s1", "connect")
    meter = Meter(access, Budget(limits or EgressLimits()))
    task = asyncio.ensure_future(tunnel(client, upstream, meter.sent, meter.received, idle_s=idle_s))
    with client, client_end, upstream, server_end:
        yield (client_end, server_end), task, access
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def read_all(connection: socket.socket) -> bytes:
    loop, got = asyncio.get_running_loop(), bytearray()
    while piece := await loop.sock_recv(connection, 1 << 16):
        got += piece
    return bytes(got)


@loops.each
@pytest.mark.parametrize("pipes", [0, 1, 64])
async def test_bytes_go_both_ways_at_once_and_arrive_whole(pipes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "MOST_PIPES", pipes)
    loop = asyncio.get_running_loop()
    up, down = os.urandom(5_000_000), os.urandom(7_000_000)

    async def write(connection: socket.socket, data: bytes) -> None:
        await loop.sock_sendall(connection, data)
        connection.shutdown(socket.SHUT_WR)

    async with between() as ((client, server), task, access):
        async with asyncio.timeout(60):
            _, _, got_up, got_down = await asyncio.gather(
                write(client, up), write(server, down), read_all(server), read_all(client)
            )
            await task
        assert hashlib.sha256(got_up).digest() == hashlib.sha256(up).digest()
        assert hashlib.sha256(got_down).digest() == hashlib.sha256(down).digest()
        assert (access.sent, access.received) == (len(up), len(down))
    assert not copying._pipes


@loops.each
async def test_one_side_may_end_and_still_hear() -> None:
    loop = asyncio.get_running_loop()
    async with between() as ((client, server), task, _), asyncio.timeout(30):
        await loop.sock_sendall(client, b"question")
        client.shutdown(socket.SHUT_WR)
        assert await read_all(server) == b"question"
        assert not task.done()
        await loop.sock_sendall(server, b"answer")
        server.shutdown(socket.SHUT_WR)
        assert await read_all(client) == b"answer"
        await task


@loops.each
async def test_who_does_not_read_holds_back_who_writes() -> None:
    loop = asyncio.get_running_loop()
    async with between() as ((client, server), _task, access):
        sending = asyncio.ensure_future(loop.sock_sendall(server, bytes(64 << 20)))
        before = -1
        while before != access.received:  # until nothing moves any more
            before = access.received
            await asyncio.sleep(0.2)
        assert not sending.done()
        assert access.received < 32 << 20
        got = 0
        async with asyncio.timeout(60):
            while got < 64 << 20:
                got += len(await loop.sock_recv(client, 1 << 20))
            await sending


@loops.each
async def test_nothing_moves_for_too_long() -> None:
    async with between(idle_s=0.1) as (_, task, _), asyncio.timeout(30):
        with pytest.raises(TimeoutError):
            await task


@loops.each
async def test_what_moves_is_not_idle() -> None:
    loop = asyncio.get_running_loop()
    for idle_s in (2, 20):  # a machine that stood still has moved nothing
        async with between(idle_s=idle_s) as ((client, server), task, _):
            until = loop.time() + idle_s * 1.25
            while loop.time() < until and not task.done():
                await loop.sock_sendall(client, b"x")
                assert await loop.sock_recv(server, 10) in (b"x", b"")
                await asyncio.sleep(0.06)
            if not task.done():
                return
    pytest.fail("it was ended while something moved")


@loops.each
async def test_a_limit_cuts_it_before_more_goes_on() -> None:
    loop = asyncio.get_running_loop()
    async with between(EgressLimits(download_bytes=1000)) as ((client, server), task, _), asyncio.timeout(30):
        await loop.sock_sendall(server, b"x" * 1000)
        assert len(await loop.sock_recv(client, 2000)) == 1000
        await loop.sock_sendall(server, b"x")
        with pytest.raises(AccessRefused, match="received"):
            await task


@loops.each
async def test_a_reset_ends_it() -> None:
    async with between() as ((client, _server), task, _), asyncio.timeout(30):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        with pytest.raises(ConnectionResetError):
            await task


@loops.each
async def test_a_body_is_copied_to_its_last_byte_and_not_one_more() -> None:
    loop = asyncio.get_running_loop()
    source, source_end = connected()
    sink, sink_end = connected()
    counted: list[int] = []
    with source, source_end, sink, sink_end:
        async with asyncio.timeout(30):
            await loop.sock_sendall(source_end, b"0123456789")
            await copy(source, sink, counted.append, most=7)
            assert await loop.sock_recv(sink_end, 100) == b"0123456"
            await copy(source, sink, counted.append, most=0)
            assert source.recv(100, socket.MSG_PEEK) == b"789"
            source_end.shutdown(socket.SHUT_WR)
            with pytest.raises(Ended):
                await copy(source, sink, counted.append, most=4)
            await copy(source, sink, counted.append)
    assert sum(counted) == 10
