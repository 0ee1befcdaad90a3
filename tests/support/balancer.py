"""A plain TCP load balancer: relays the bytes of each connection to the next server that accepts one.

Knows nothing of HTTP. It runs in a thread with a loop of its own, so that a busy test does not slow it down.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from urllib.parse import urlsplit

Addresses = Callable[[], Sequence[str]]
"""Returns the URLs of the servers as they are now: a server that was started again may listen on another port."""
_PIECE = 256 * 1024


class Balancer:
    """Started when made; `url` is where clients connect."""

    def __init__(self, addresses: Addresses):
        self._addresses = addresses
        self._turn = 0
        self.connections: list[int] = []
        """How many connections each server got, in the order of the addresses."""
        self._relays: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="balancer")
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(30)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _open(self) -> asyncio.Server:
        return await asyncio.start_server(self._accepted, "127.0.0.1", 0, limit=_PIECE)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relay = self._loop.create_task(self._relay(reader, writer))
        self._relays.add(relay)
        relay.add_done_callback(self._relays.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay until the server closes; when the client closes, the server is told, and may still answer."""
        server = await self._connected()
        if server is None:
            writer.transport.abort()
            return
        there = self._loop.create_task(_copy(reader, server[1]))
        try:
            await _copy(server[0], writer)
            writer.close()
        finally:
            there.cancel()
            server[1].transport.abort()
            if not writer.is_closing():
                writer.transport.abort()

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """Connect to the server whose turn it is, or to the next one that accepts."""
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

    async def _close(self) -> None:
        self._server.close()
        relays = list(self._relays)
        for each in relays:
            each.cancel()
        await asyncio.gather(*relays, return_exceptions=True)
        await self._server.wait_closed()

    def close(self) -> None:
        """Close every connection."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until one side has sent everything, and tell the other."""
    with suppress(OSError):
        while data := await reader.read(_PIECE):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
