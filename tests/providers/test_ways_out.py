"""Connections of sandboxes on other machines: carried over lines with mutual TLS, from the port in the sandbox to the
socket of the proxy. Both ends are the real ones: that of the sandbox in a thread, that of the server on its own loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from tests.support import loops
from tests.support.remote_provider import TRUST_DOMAIN, identities

from carrel.primitives.relay_line import RelayLine, RelayMessage, message
from carrel.primitives.spiffe import SpiffeId, server_context
from carrel.primitives.tasks import cancel
from carrel.primitives.tls_listener import TlsListener
from carrel.primitives.trees import remove_tree
from carrel.providers import ways_out
from carrel.providers.links import RemoteAddress, RemoteLink
from carrel.providers.ways_out import WaysOut
from carrel.supervisor.http import HttpRouter
from carrel.supervisor.relay import relay_all
from carrel.supervisor.remote import ServerConnections, _ServerConnection

SANDBOX = "box"
DEADLINE_S = 30
BIG = os.urandom(1 << 20) * 6


class Misbehaving(asyncio.Protocol):
    """A supervisor that sends what a line must not have, as soon as it is connected."""

    met = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        Misbehaving.met += 1
        assert isinstance(transport, asyncio.Transport)
        transport.write(message(RelayMessage.DATA, 5) + b"12345")


class Supervisor(threading.Thread):
    """The part of a supervisor that matters here: it has the port of the proxy, and listens for servers."""

    def __init__(self, protocol: Callable[[], asyncio.Protocol] | None = None):
        super().__init__()
        self.known = identities()
        self._protocol = protocol
        self.port, self._control = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
        self._loop = asyncio.new_event_loop()
        self._told_to_end = asyncio.Event()

    def run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        own = self.known.sandboxes.for_sandbox(SANDBOX)
        context, servers = server_context(own), ServerConnections(own, set())
        router = HttpRouter(lambda run: None)
        protocol = self._protocol or (lambda: _ServerConnection(router, set(), servers))
        accepting = TlsListener(self._control, lambda: context, protocol)
        serving = [asyncio.create_task(each) for each in (accepting.run(), relay_all(self.port, servers.lines.carry))]
        await self._told_to_end.wait()
        await cancel(serving)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            await cancel((task,))
        for transport in [line._transport for line in servers.lines._free]:
            if transport is not None:
                transport.abort()
        for connection in list(servers._open):
            connection.abort()
        await asyncio.sleep(0.05)  # what was aborted is closed by the loop

    @property
    def link(self) -> RemoteLink:
        where = RemoteAddress(*self._control.getsockname(), SpiffeId.sandbox(TRUST_DOMAIN, SANDBOX))
        return RemoteLink(where, self.known.sandboxes.client_context)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._told_to_end.set)
        self.join()
        self.port.close()
        self._control.close()


@dataclass
class Ground:
    supervisor: Supervisor
    ways: WaysOut
    proxy: socket.socket
    folder: str
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def client(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return self._kept(await asyncio.open_connection(*self.supervisor.port.getsockname()))

    async def accepted(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        connection, _ = await asyncio.get_running_loop().sock_accept(self.proxy)
        return self._kept(await asyncio.open_unix_connection(sock=connection))

    def _kept(
        self, made: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self.writers.append(made[1])
        return made

    async def close(self) -> None:
        for each in self.writers:
            each.transport.abort()
            with contextlib.suppress(OSError):
                await each.wait_closed()
        self.proxy.close()


@asynccontextmanager
async def ground(protocol: Callable[[], asyncio.Protocol] | None = None) -> AsyncIterator[Ground]:
    place = tempfile.mkdtemp(prefix="carrel-t-")
    supervisor, ways = Supervisor(protocol), WaysOut(f"{place}/ways")
    supervisor.start()
    proxy = socket.socket(fileno=await ways.open(SANDBOX, supervisor.link))
    proxy.setblocking(False)
    found = Ground(supervisor, ways, proxy, f"{place}/ways")
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield found
    finally:
        await found.close()
        await ways.close_all()
        assert not os.path.exists(f"{place}/ways")
        await asyncio.to_thread(supervisor.close)
        remove_tree(place)


async def echo(ground: Ground) -> None:
    """Send back what a client has sent, once it has ended."""
    reader, writer = await ground.accepted()
    writer.write(await reader.read())
    writer.write_eof()
    await writer.drain()
    writer.close()


async def ask(ground: Ground, said: bytes) -> bytes:
    reader, writer = await ground.client()

    async def send() -> None:
        writer.write(said)
        await writer.drain()
        writer.write_eof()

    answer, _ = await asyncio.gather(reader.read(), send())
    writer.close()
    return answer


@loops.each
async def test_both_directions_end_on_their_own_and_lines_are_used_again():
    async with ground() as found:
        for said in (b"hello", b"", BIG, b"again"):
            answer, _ = await asyncio.gather(ask(found, said), echo(found))
            assert answer == said
        way = found.ways._open[SANDBOX]
        assert len(way._lines) <= 2


async def test_many_connections_at_once():
    async with ground() as found:
        count = 2 * ways_out.MOST_IDLE + 3
        clients = [await found.client() for _ in range(count)]
        served = [await found.accepted() for _ in range(count)]
        for number, (_, writer) in enumerate(clients):
            writer.write(b"%04d" % number)
        assert sorted([await reader.readexactly(4) for reader, _ in served]) == [b"%04d" % n for n in range(count)]
        for _, writer in (*clients, *served):
            writer.close()
        way = found.ways._open[SANDBOX]
        while len(way._lines) > ways_out.MOST_IDLE:
            await asyncio.sleep(0.02)


async def test_a_slow_reader_makes_the_writer_wait():
    async with ground() as found:
        _, client = await found.client()
        reader, _ = await found.accepted()
        sent = 0
        with contextlib.suppress(TimeoutError):
            while True:
                client.write(bytes(1 << 20))
                async with asyncio.timeout(1):
                    await client.drain()
                sent += 1 << 20
                assert sent < 64 << 20, "everything is kept in memory"
        while sent > 0:
            sent -= len(await reader.read(1 << 20))


async def test_a_client_that_breaks_off_ends_its_stream_alone():
    async with ground() as found:
        _, writer = await found.client()
        theirs, _ = await found.accepted()
        other = await found.client()
        kept, _ = await found.accepted()
        writer.transport.abort()
        assert await theirs.read() == b""
        other[1].write(b"still here")
        assert await kept.readexactly(10) == b"still here"


async def test_lines_end_when_nobody_listens_any_more():
    async with ground() as found:
        found.proxy.close()
        reader, _ = await found.client()
        assert await reader.read() == b""
        way = found.ways._open[SANDBOX]
        while way._lines:
            await asyncio.sleep(0.02)
        assert way._ended


async def test_another_socket_takes_the_place_of_the_first():
    async with ground() as found:
        found.proxy.close()
        found.proxy = socket.socket(fileno=await found.ways.open(SANDBOX, found.supervisor.link))
        found.proxy.setblocking(False)
        answer, _ = await asyncio.gather(ask(found, b"anew"), echo(found))
        assert answer == b"anew"
        assert os.listdir(found.folder) == [hashlib.sha256(SANDBOX.encode()).hexdigest()[:16]]


async def test_a_supervisor_that_misbehaves_is_not_dialled_again_and_again():
    Misbehaving.met = 0
    async with ground(Misbehaving) as found:
        while Misbehaving.met < 4:
            await asyncio.sleep(0.02)
        way = found.ways._open[SANDBOX]
        assert way._backoff.next_pause() > 4 * ways_out._FIRST_PAUSE_S
        with pytest.raises(BlockingIOError):
            found.proxy.accept()


async def test_a_line_takes_no_stream_within_a_stream():
    lost = []

    class Owner:
        def idle(self, line: RelayLine) -> None: ...
        def begun(self, line: RelayLine, waiting: int) -> None: ...
        def lost(self, line: RelayLine) -> None:
            lost.append(line)

    ours, theirs = socket.socketpair()
    line = RelayLine(Owner(), begins=False)
    await asyncio.get_running_loop().create_unix_connection(lambda: line, sock=ours)
    with theirs:
        theirs.send(message(RelayMessage.BEGIN) + message(RelayMessage.BEGIN))
        while not lost:
            await asyncio.sleep(0.01)
