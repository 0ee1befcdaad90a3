"""Relays of bytes: a line that can be cut, and a plain TCP load balancer. Know nothing of HTTP or of databases.

Each runs in a thread with a loop of its own, so that a busy test does not slow it down.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal
from urllib.parse import urlsplit

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
State = Literal["passes", "silent", "refuses"]
_PIECE = 256 * 1024


class Relay(ABC):
    """Passes the bytes of every connection on. `listen` is the path of a Unix socket; without it a port is taken."""

    def __init__(self, listen: str | None = None) -> None:
        self._open = asyncio.Event()
        self._state: State = "passes"
        self._relays: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay")
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._begin(listen), self._loop).result(30)
        self.url = "" if listen else f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    @abstractmethod
    async def connect(self) -> Streams | None:
        """Connect to where the bytes of the next connection go; None if nobody takes it."""

    async def _begin(self, listen: str | None) -> asyncio.Server:
        self._open.set()
        if listen is not None:
            return await asyncio.start_unix_server(self._accepted, listen, limit=_PIECE)
        return await asyncio.start_server(self._accepted, "127.0.0.1", 0, limit=_PIECE)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relay = self._loop.create_task(self._relay(reader, writer))
        self._relays.add(relay)
        relay.add_done_callback(self._relays.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay until the server closes; when the client closes, the server is told, and may still answer."""
        server = None
        try:
            await self._open.wait()
            server = None if self._state == "refuses" else await self.connect()
            if server is None:
                return
            there = self._loop.create_task(self._copy(reader, server[1]))
            try:
                await self._copy(server[0], writer)
                writer.close()
            finally:
                there.cancel()
        finally:
            if server is not None:
                server[1].transport.abort()
            if not writer.is_closing():
                writer.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copy until one side has sent everything or is gone, and tell the other."""
        try:
            while data := await reader.read(_PIECE):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
            await self._open.wait()
            writer.write_eof()
        except OSError:
            await self._open.wait()
            writer.transport.abort()

    def set(self, state: State) -> None:
        """`silent`: nothing is passed on, as if packets were lost. `refuses`: every connection breaks."""
        asyncio.run_coroutine_threadsafe(self._set(state), self._loop).result(30)

    async def _set(self, state: State) -> None:
        self._state = state
        if state == "silent":
            self._open.clear()
        else:
            self._open.set()
        if state == "refuses":
            await self._end_relays()

    async def _end_relays(self) -> None:
        relays = list(self._relays)
        for each in relays:
            each.cancel()
        await asyncio.gather(*relays, return_exceptions=True)

    async def _close(self) -> None:
        self._server.close()
        await self._end_relays()
        await self._server.wait_closed()

    def close(self) -> None:
        """Close every connection."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()


class UnixLine(Relay):
    """A line from one Unix socket to another."""

    def __init__(self, listen: str, target: str):
        self._target = target
        super().__init__(listen)

    async def connect(self) -> Streams | None:
        """See `Relay`."""
        with suppress(OSError):
            return await asyncio.open_unix_connection(self._target, limit=_PIECE)
        return None


Addresses = Callable[[], Sequence[str]]
"""Returns the URLs of the servers as they are now: a server that was started again may listen on another port."""


class Balancer(Relay):
    """Gives each connection to the next server that accepts it. `url` is where clients connect."""

    def __init__(self, addresses: Addresses):
        self._addresses = addresses
        self._turn = 0
        self.connections: list[int] = []
        """How many connections each server got, in the order of the addresses."""
        super().__init__()

    async def connect(self) -> Streams | None:
        """See `Relay`."""
        found = self._addresses()
        first, self._turn = self._turn, self._turn + 1
        self.connections += [0] * (len(found) - len(self.connections))
        for number in range(len(found)):
            which = (first + number) % len(found)
            parts = urlsplit(found[which])
            with suppress(OSError):
                connected = await asyncio.open_connection(parts.hostname, parts.port, limit=_PIECE)
                self.connections[which] += 1
                return connected
        return None


class UnixToTcp(Relay):
    """A line from a Unix socket to a port, for a process in another network namespace."""

    def __init__(self, listen: str, host: str, port: int):
        self._target = host, port
        super().__init__(listen)

    async def connect(self) -> Streams | None:
        """See `Relay`."""
        with suppress(OSError):
            return await asyncio.open_connection(*self._target, limit=_PIECE)
        return None


if __name__ == "__main__":  # PATH HOST PORT, until standard input ends
    line = UnixToTcp(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    print("ready", flush=True)
    sys.stdin.read()
    line.close()
