"""What one connection may cost, against a real HTTP server with a small application."""

from __future__ import annotations

import asyncio
import ctypes
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from carrel import connections as module
from carrel.api.serving import HttpServer
from carrel.connections import MAX_FIELDS, MAX_HEAD, Connections, connections_allowed, of_scope

PATIENCE_S = 60


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Knows every caller at /known, holds the answer at /held until the caller is gone, and reads every body."""
    connection = of_scope(scope)
    assert connection is not None
    if scope["path"] != "/open":
        connection.authenticated()
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        for _ in range(1000 if scope["path"] == "/much" else 0):
            await send({"type": "websocket.send", "bytes": bytes(10_000)})
        while (await receive())["type"] != "websocket.disconnect":
            pass
        return
    message = {"more_body": True}
    size = 0
    while message.get("more_body"):
        message = cast("dict[str, bool]", await receive())
        size += len(cast("dict[str, bytes]", message).get("body", b""))
    if scope["path"] == "/held":
        while message["type"] != "http.disconnect":  # type: ignore[comparison-overlap]
            message = cast("dict[str, bool]", await receive())
        return
    body = b"%d" % size
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def serving(connections: Connections) -> AsyncIterator[int]:
    server = HttpServer(application, connections)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not server.started:
                    await asyncio.sleep(0.001)
            yield listener.getsockname()[1]
        finally:
            server.end()
            await task


class Peer:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[int, bytes]:
        async with asyncio.timeout(PATIENCE_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split()[0])
            return int(head.split()[1]), await self.reader.readexactly(length)

    async def ask(self, path: str) -> int:
        self.send(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        return (await self.answer())[0]

    async def rest(self) -> bytes:
        """All that comes until the server closes."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""


@asynccontextmanager
async def peer(port: int) -> AsyncIterator[Peer]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Peer(reader, writer)
    finally:
        writer.transport.abort()


ENDLESS = {
    "path": (b"GET /", b"a" * 1024),
    "header value": (b"GET / HTTP/1.1\r\nx: ", b"a" * 1024),
    "header name": (b"GET / HTTP/1.1\r\n", b"a" * 1024),
    "headers": (b"GET / HTTP/1.1\r\n", (b"a: b\r\n" * 200)),
    "few long headers": (b"GET / HTTP/1.1\r\n", b"a: " + b"b" * 1000 + b"\r\n"),
    "websocket": (b"GET / HTTP/1.1\r\nupgrade: websocket\r\nconnection: upgrade\r\nx: ", b"a" * 1024),
    "trailer value": (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx: ", b"a" * 1024),
    "trailers": (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n", b"a: b\r\n" * 200),
    "chunk extension": (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1;", b"a" * 1024),
}


@pytest.mark.parametrize("kind", ENDLESS)
async def test_head_without_end_is_refused(kind: str) -> None:
    start, more = ENDLESS[kind]
    async with serving(Connections(64)) as port, peer(port) as attacker:
        attacker.send(start + more * (1 + 2 * MAX_HEAD // len(more)))
        status, body = await attacker.answer()
        assert status == json.loads(body)["status"] == 431, body
        assert json.loads(body)["code"] == "too_large"
        assert await attacker.rest() == b""


async def test_head_that_comes_byte_by_byte_is_bounded_too() -> None:
    async with serving(Connections(64)) as port, peer(port) as attacker:
        attacker.send(b"GET / HTTP/1.1\r\nx: ")
        for _ in range(MAX_HEAD // 512):
            attacker.send(b"a" * 512)
            await attacker.writer.drain()
        assert (await attacker.answer())[0] == 431


async def test_requests_within_the_bounds_are_answered() -> None:
    async with serving(Connections(64)) as port, peer(port) as caller:
        fields = b"".join(b"x-%d: %s\r\n" % (number, b"v" * 200) for number in range(MAX_FIELDS - 1))
        caller.send(b"GET /known HTTP/1.1\r\nhost: x\r\n" + fields + b"\r\n")
        assert (await caller.answer())[0] == 200
        body = b"x" * 1_000_000
        caller.send(b"POST /known HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        assert await caller.answer() == (200, b"1000000")
        chunks = b"".join(b"%x;name=value\r\n%s\r\n" % (len(part), part) for part in [b"y" * 10_000] * 20)
        head = b"POST /known HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        caller.send(head + chunks + b"0\r\nx-sum: 1\r\n\r\n")
        assert await caller.answer() == (200, b"200000")
        caller.send(b"GET /known HTTP/1.1\r\nhost: x\r\n\r\n" * module.MAX_PIPELINED)
        assert {(await caller.answer())[0] for _ in range(module.MAX_PIPELINED)} == {200}


async def test_too_many_requests_ahead_of_their_answers_close_the_connection() -> None:
    async with serving(Connections(64)) as port, peer(port) as attacker:
        attacker.send(b"GET /held HTTP/1.1\r\nhost: x\r\n\r\n" + b"GET /open HTTP/1.1\r\nhost: x\r\n\r\n" * 5000)
        assert await attacker.rest() == b"", "an answer here could be taken for that of the first request"


async def test_slow_heads_are_ended() -> None:
    async with serving(Connections(64, head_s=0.05)) as port, peer(port) as slow, peer(port) as known:
        slow.send(b"GET / HT")
        assert (await slow.answer())[0] == 408
        assert await slow.rest() == b""
        assert await known.ask("/known") == 200
        known.send(b"GET /kn")
        assert (await known.answer())[0] == 408, "also that of a later request"


async def test_unknown_callers_are_closed_in_time_and_known_ones_stay() -> None:
    connections = Connections(64, unknown_s=0.2)
    async with serving(connections) as port, peer(port) as known, peer(port) as silent, peer(port) as asking:
        assert await known.ask("/known") == 200
        assert await asking.ask("/open") == 200
        asking.send(b"POST /open HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n12")
        assert await silent.rest() == b""
        assert await asking.rest() == b"", "a body that does not come keeps nobody here"
        assert await known.ask("/known") == 200
        assert (len(connections), connections.unknown) == (1, 0)


async def test_answer_of_a_slow_server_gets_more_time() -> None:
    class Transport(asyncio.Transport):
        aborted = False

        def abort(self) -> None:
            self.aborted = True

    loop, transport = asyncio.get_running_loop(), Transport()
    connections = Connections(4, unknown_s=0.001)
    added = connections.add(transport, loop)
    assert added is not None
    added.answering = True
    async with asyncio.timeout(PATIENCE_S):
        while not added._prolonged:
            await asyncio.sleep(0.001)
        while not transport.aborted:
            await asyncio.sleep(0.001)
    assert len(connections) == 0


async def test_idle_connections_make_way_oldest_first() -> None:
    connections = Connections(64, most_unknown=8)
    async with serving(connections) as port, peer(port) as known, peer(port) as first:
        assert await known.ask("/known") == 200
        more = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
        try:
            assert await first.rest() == b""
            async with peer(port) as newcomer:
                assert await newcomer.ask("/known") == 200
            assert await known.ask("/known") == 200, "connections of known callers are not closed for strangers"
            assert connections.unknown <= 8
        finally:
            for _, writer in more:
                writer.transport.abort()


async def test_connections_of_known_callers_are_bounded() -> None:
    connections = Connections(4)
    async with (
        serving(connections) as port,
        peer(port) as idle,
        peer(port) as one,
        peer(port) as two,
        peer(port) as three,
    ):
        assert await idle.ask("/known") == 200
        for busy in (one, two, three):
            busy.send(b"GET /held HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            while connections.unknown or len(connections) < 4:
                await asyncio.sleep(0.001)
        async with peer(port) as newcomer:
            assert await newcomer.ask("/known") == 200, "one that is idle makes way"
            assert await idle.rest() == b""
            newcomer.send(b"GET /held HTTP/1.1\r\nhost: x\r\n\r\n")
            async with asyncio.timeout(PATIENCE_S):
                while connections._idle:
                    await asyncio.sleep(0.001)
            async with peer(port) as refused:
                status, body = await refused.answer()
                assert (status, json.loads(body)["code"]) == (503, "limit_exceeded")


UPGRADE = (
    b"GET / HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


async def test_callers_that_are_gone_are_noticed_and_suspended_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.02)
    monkeypatch.setattr(module, "MOST_UNANSWERED", 2)
    # A small program for the kernel: drop every packet for this socket, as if its machine were gone.
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
    connections = Connections(64)
    async with serving(connections) as port:
        with socket.create_connection(("127.0.0.1", port)) as suspended, socket.socket() as gone:
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that the server has more to send
            gone.connect(("127.0.0.1", port))
            loop = asyncio.get_running_loop()
            for each in (suspended, gone):
                each.setblocking(False)
                each.send(UPGRADE.replace(b"/", b"/much", 1))
                assert await asyncio.wait_for(loop.sock_recv(each, 12), PATIENCE_S) == b"HTTP/1.1 101"
            assert len(connections) == 2
            gone.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HL", 1, ctypes.addressof(drop_all)))  # SO_ATTACH_FILTER
            async with asyncio.timeout(PATIENCE_S):
                while len(connections) == 2:
                    await asyncio.sleep(0.001)
                received = 0
                while received < 10_000_000:
                    received += len(await loop.sock_recv(suspended, 1 << 20))


async def test_websockets_are_counted_until_they_close() -> None:
    connections = Connections(64)
    head = UPGRADE
    async with serving(connections) as port:
        async with peer(port) as caller:
            caller.send(head)
            assert b" 101 " in await caller.reader.readuntil(b"\r\n\r\n")
            assert (len(connections), connections.unknown) == (1, 0)
        async with asyncio.timeout(PATIENCE_S):
            while len(connections):
                await asyncio.sleep(0.001)
        for bad in (b"x: " + b"a" * 9000, b"sec-websocket-protocol: ,", b"x-\xff: 1", b"content-length: 5"):
            async with peer(port) as caller:
                caller.send(head[:-2] + bad + b"\r\n\r\n")
                assert (await caller.rest()).split()[1] == b"400"
        async with asyncio.timeout(PATIENCE_S):
            while len(connections):
                await asyncio.sleep(0.001)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(["open", "know", "busy", "idle", "close"]), max_size=60), st.integers(1, 4))
def test_bounds_hold_whatever_happens(steps: list[str], most: int) -> None:
    class Transport(asyncio.Transport):
        def __init__(self, number: int):
            super().__init__({"peername": (f"10.0.0.{number % 3}", number)})

        def abort(self) -> None:
            pass

    loop = asyncio.new_event_loop()
    connections = Connections(most, most_unknown=2)
    opened = []
    try:
        for number, step in enumerate(steps):
            if step == "open":
                opened.append(connections.add(Transport(number), loop))
            elif opened and (one := opened[number % len(opened)]) is not None:
                {"know": one.authenticated, "busy": one.begin, "idle": one.answered, "close": one.closed}[step]()
            assert len(connections) <= most and connections.unknown <= 2
        for each in opened:
            if each is not None:
                each.closed()
        assert len(connections) == 0 and not connections._idle and not connections._by_peer
    finally:
        loop.close()


async def test_peer_with_many_connections_makes_way_for_itself() -> None:
    class Transport(asyncio.Transport):
        aborted = False

        def __init__(self, host: str):
            super().__init__({"peername": (host, 1)})

        def abort(self) -> None:
            self.aborted = True

    loop = asyncio.get_running_loop()
    connections = Connections(8, most_unknown=4)
    other = Transport("10.0.0.1")
    added = [connections.add(other, loop)]
    crowd = [Transport(f"fd00::{number}") for number in range(50)]
    added += [connections.add(each, loop) for each in crowd]
    assert not other.aborted, "one network cannot push others out"
    assert [each.aborted for each in crowd] == [True] * 47 + [False] * 3
    for each in added:
        assert each is not None
        each.closed()


def test_half_of_the_descriptors_are_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, allowed in ((1024, 512), (1_000_000, 16_384), (module.resource.RLIM_INFINITY, 16_384)):
        monkeypatch.setattr(module.resource, "getrlimit", lambda _which, soft=soft: (soft, soft))
        assert connections_allowed() == allowed
