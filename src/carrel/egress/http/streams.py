"""TLS on sockets that belong to somebody else, and HTTP/1 messages read from it, piece by piece and within bounds.

TLS itself is the event loop's. Decides nothing and knows neither rules nor credentials.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

from carrel.egress.http.messages import Chunks, Head, end_of
from carrel.egress.sockets import Ended

HANDSHAKE_S = 10.0
HEAD_S = 10.0
"""A head must come whole within this time, once it has begun."""

_PIECE = 64 * 1024
_FAREWELL_S = 2.0


class Stream:
    """One side of an opened connection: what came out of its TLS, and what goes into it.

    `moved` is called whenever bytes have moved. Nothing is lost when a call that waits is cancelled.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, moved: Callable[[], None]):
        self._reader, self._writer = reader, writer
        self._moved = moved
        self.rest = b""
        """Bytes that have come and that nobody has used."""

    async def more(self) -> bool:
        """Wait for more bytes, which are added to `rest`; False when no more will come. Raises `OSError`."""
        data = await self._reader.read(_PIECE)
        self._moved()
        self.rest = self.rest + data if self.rest else data
        return bool(data)

    async def head(self) -> bytes | None:
        """The next head; None when the peer ended without beginning one. Raises `OSError`, `TimeoutError`, and
        `Refused` when it is too long.
        """
        if not self.rest and not await self.more():
            return None
        async with asyncio.timeout(HEAD_S):
            while (end := end_of(self.rest)) is None:
                if not await self.more():
                    raise Ended("the peer has ended in the middle of a head")
        return self.take(end)

    def take(self, size: int) -> bytes:
        """Up to so many bytes of `rest`, which then are used."""
        data, self.rest = self.rest[:size], self.rest[size:]
        return data

    async def write(self, data: bytes) -> None:
        """Send, and wait until not too much waits to be sent. Raises `OSError`."""
        self._writer.write(data)
        await self._writer.drain()
        self._moved()

    async def finish(self) -> None:
        """End it in good order: what was written goes out, and the peer is told that nothing was cut off."""
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(_FAREWELL_S):
                self._writer.close()
                await self._writer.wait_closed()

    def abort(self) -> None:
        """End it at once. Does nothing more to one that has ended."""
        self._writer.transport.abort()


class Body:
    """The body that follows a head. Where nothing says how long it is, it goes on to the end of the connection."""

    def __init__(self, stream: Stream, head: Head | None = None):
        self._stream = stream
        self._chunks = Chunks() if head is not None and head.chunked else None
        self._left = None if head is None else head.length

    async def piece(self) -> bytes:
        """The next piece, which is empty when there is no more. Raises `OSError`, and `Refused` for what is no body."""
        stream = self._stream
        while True:
            if self._chunks is not None:
                used, data = self._chunks.feed(stream.rest)
                stream.take(used)
                if data or self._chunks.ended:
                    return data
            elif self._left is None:
                if stream.rest:
                    return stream.take(_PIECE)
            elif not self._left:
                return b""
            elif stream.rest:
                data = stream.take(self._left)
                self._left -= len(data)
                return data
            if not await stream.more():
                if self._chunks is None and self._left is None:
                    return b""
                raise Ended("the peer has ended in the middle of a body")


async def accept_tls(connection: socket.socket, context: ssl.SSLContext, moved: Callable[[], None]) -> Stream:
    """TLS with a client whose first byte is still unread. The socket stays the caller's. Raises `OSError`."""
    loop, reader, protocol = _parts()
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol,
        connection.dup(),
        ssl=context,
        ssl_handshake_timeout=HANDSHAKE_S,
        ssl_shutdown_timeout=_FAREWELL_S,
    )
    return Stream(reader, asyncio.StreamWriter(transport, protocol, reader, loop), moved)


async def begin_tls(connection: socket.socket, context: ssl.SSLContext, host: str, moved: Callable[[], None]) -> Stream:
    """TLS with the server `host`, whose certificate is verified. The socket stays the caller's. Raises `OSError`."""
    loop, reader, protocol = _parts()
    transport, _ = await loop.create_connection(
        lambda: protocol,
        sock=connection.dup(),
        ssl=context,
        server_hostname=host,
        ssl_handshake_timeout=HANDSHAKE_S,
        ssl_shutdown_timeout=_FAREWELL_S,
    )
    return Stream(reader, asyncio.StreamWriter(transport, protocol, reader, loop), moved)


def _parts() -> tuple[asyncio.AbstractEventLoop, asyncio.StreamReader, asyncio.StreamReaderProtocol]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_PIECE, loop=loop)
    return loop, reader, asyncio.StreamReaderProtocol(reader, loop=loop)
