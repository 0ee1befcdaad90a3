"""One side of a relayed HTTP/1 connection, over a raw socket or over TLS: reads heads and bodies within bounds.

The TLS itself is asyncio's. Knows neither rules nor credentials.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import suppress

from carrel.egress.copying import copy, tunnel
from carrel.egress.http.messages import Chunks, MessageHead, chunk, end_of
from carrel.egress.sockets import (
    FREE_LOOKS,
    IDLE_S,
    PAUSE_S,
    Ended,
    Undeliverable,
    close_after_delivery,
    readable,
    send,
)
from carrel.primitives.tasks import cancel
from carrel.redaction.redact import StreamRedactor

HANDSHAKE_S = 10.0
HEAD_S = 10.0
"""A head must arrive completely within this time, once it has begun."""
QUIET_S = 0.05
"""When a server is silent for this long, the few bytes that may begin a secret are passed on."""

_PIECE = 64 * 1024
_FAREWELL_S = 2.0


class ByteStream(ABC):
    """One side of a connection. A call that waits can be cancelled without losing bytes."""

    def __init__(self, rest: bytes = b""):
        self.rest = rest
        """Bytes that were received and not used yet."""

    @abstractmethod
    async def more(self, patience_s: float | None = None) -> bool:
        """Wait for more bytes and add them to `rest`; return False at the end. Raises `OSError`."""

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Send, and wait while too much is waiting to be sent. Raises `Undeliverable`, `TimeoutError`."""

    @abstractmethod
    async def finish(self) -> None:
        """End the connection in good order: everything written is sent, and the peer sees that nothing was cut off."""

    async def head(self) -> bytes | None:
        """Read the next head; None when the peer ended without beginning one. Raises `OSError`, `TimeoutError`, and
        `Refused` when it is too long.
        """
        if not self.rest and not await self.more():
            return None
        end = end_of(self.rest)
        if end is None:
            async with asyncio.timeout(HEAD_S):
                end = await self._end_of_head()
        return self.take(end)

    async def _end_of_head(self) -> int:
        looks = 0
        while (end := end_of(self.rest)) is None:
            looks += 1
            if looks > FREE_LOOKS:  # a peer that sends byte by byte must not cost a search for each byte
                await asyncio.sleep(PAUSE_S)
            if not await self.more():
                raise Ended("the peer ended in the middle of a head")
        return end

    def take(self, size: int) -> bytes:
        """Remove up to `size` bytes from `rest` and return them."""
        data, self.rest = self.rest[:size], self.rest[size:]
        return data


class SocketStream(ByteStream):
    """A raw, non-blocking socket, which stays the caller's. `rest`: bytes that the caller has already taken from it."""

    def __init__(self, connection: socket.socket, rest: bytes = b""):
        super().__init__(rest)
        self.socket = connection
        self._wrote = False
        self._ended = False

    async def more(self, patience_s: float | None = None) -> bool:
        """See `ByteStream`. Waits at most `patience_s`, or `IDLE_S`."""
        patience_s = IDLE_S if patience_s is None else patience_s
        if self._wrote:  # the peer cannot have answered yet: do not try to read before
            self._wrote = False
            await readable(self.socket, patience_s)
        while True:
            try:
                data = self.socket.recv(_PIECE)
            except BlockingIOError:
                await readable(self.socket, patience_s)
                continue
            self.rest = self.rest + data if self.rest else data
            self._ended = not data
            return not self._ended

    async def write(self, data: bytes) -> None:
        """See `ByteStream`."""
        self._wrote = True
        try:
            await send(self.socket, data)
        except TimeoutError:
            raise
        except OSError as error:
            raise Undeliverable(*error.args) from None

    async def finish(self) -> None:
        """See `ByteStream`."""
        if not self._ended:
            await close_after_delivery(self.socket)

    @property
    def silent(self) -> bool:
        """Whether the peer is still there and has sent nothing that was not used."""
        if self.rest:
            return False
        try:
            self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False


class TlsStream(ByteStream):
    """TLS on a socket that stays the caller's. Calls `moved` whenever bytes have moved, so that the caller can limit
    how long the whole connection is idle.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, moved: Callable[[], None]):
        super().__init__()
        self._reader, self._writer = reader, writer
        self._moved = moved

    async def more(self, patience_s: float | None = None) -> bool:
        """See `ByteStream`."""
        async with asyncio.timeout(patience_s):
            data = await self._reader.read(_PIECE)
        self._moved()
        self.rest = self.rest + data if self.rest else data
        return bool(data)

    async def write(self, data: bytes) -> None:
        """See `ByteStream`."""
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError as error:
            raise Undeliverable(*error.args) from None
        self._moved()

    async def finish(self) -> None:
        """See `ByteStream`."""
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(_FAREWELL_S):
                self._writer.close()
                await self._writer.wait_closed()

    def abort(self) -> None:
        """End it at once. May be called after it has ended."""
        self._writer.transport.abort()


async def accept_tls(connection: socket.socket, context: ssl.SSLContext, moved: Callable[[], None]) -> TlsStream:
    """Start TLS with a client whose first byte is still unread. Raises `OSError`."""
    loop, reader, protocol = _parts()
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol,
        connection.dup(),
        ssl=context,
        ssl_handshake_timeout=HANDSHAKE_S,
        ssl_shutdown_timeout=_FAREWELL_S,
    )
    return TlsStream(reader, asyncio.StreamWriter(transport, protocol, reader, loop), moved)


async def begin_tls(
    connection: socket.socket, context: ssl.SSLContext, host: str, moved: Callable[[], None]
) -> TlsStream:
    """Start TLS with the server `host` and verify its certificate. Raises `OSError`."""
    loop, reader, protocol = _parts()
    transport, _ = await loop.create_connection(
        lambda: protocol,
        sock=connection.dup(),
        ssl=context,
        server_hostname=host,
        ssl_handshake_timeout=HANDSHAKE_S,
        ssl_shutdown_timeout=_FAREWELL_S,
    )
    return TlsStream(reader, asyncio.StreamWriter(transport, protocol, reader, loop), moved)


def _parts() -> tuple[asyncio.AbstractEventLoop, asyncio.StreamReader, asyncio.StreamReaderProtocol]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_PIECE, loop=loop)
    return loop, reader, asyncio.StreamReaderProtocol(reader, loop=loop)


class Body:
    """Reads the body that follows a head. Without a head or a length it extends to the end of the connection.

    `count` is called with the number of bytes used, those between chunks included.
    """

    def __init__(self, stream: ByteStream, head: MessageHead | None, count: Callable[[int], None]):
        self._stream = stream
        self._count = count
        self._chunks = Chunks() if head is not None and head.chunked else None
        self._left = None if head is None else head.length

    async def piece(self) -> bytes:
        """Read the next piece; empty at the end. Raises `OSError`, and `Refused` for an invalid body."""
        stream = self._stream
        while True:
            if self._chunks is not None:
                used, data = self._chunks.feed(stream.rest)
                stream.take(used)
                self._count(used)
                if data or self._chunks.ended:
                    return data
            elif self._left == 0:
                return b""
            elif stream.rest:
                data = stream.take(_PIECE if self._left is None else self._left)
                if self._left is not None:
                    self._left -= len(data)
                self._count(len(data))
                return data
            if not await stream.more():
                if self._chunks is None and self._left is None:
                    return b""
                raise Ended("the peer ended in the middle of a body")


async def forward(
    source: ByteStream,
    sink: ByteStream,
    head: MessageHead | None,
    count: Callable[[int], None],
    *,
    first: bytes = b"",
    chunked: bool = False,
    redactor: StreamRedactor | None = None,
) -> None:
    """Forward the body that follows `head`, in chunks if `chunked`, redacted if there is a redactor. `first` is written
    before it. Raises `Undeliverable` when the sink takes no more, and as `Body` does.
    """
    unchanged = not chunked and redactor is None and not (head is not None and head.chunked)
    if unchanged and isinstance(source, SocketStream) and isinstance(sink, SocketStream):
        length = None if head is None else head.length
        received = source.take(len(source.rest) if length is None else length)
        count(len(received))
        await sink.write(first + received)  # most responses are then one packet
        await copy(source.socket, sink.socket, count, most=None if length is None else length - len(received))
        return

    async def give(data: bytes) -> None:
        if data:
            await sink.write(chunk(data) if chunked else data)

    if first:
        await sink.write(first)
    body = Body(source, head, count)
    while piece := await _next_piece(body, redactor, give):
        await give(piece if redactor is None else redactor.feed(piece))
    await give(b"" if redactor is None else redactor.finish())
    if chunked:
        await sink.write(chunk(b""))


async def _next_piece(body: Body, redactor: StreamRedactor | None, give: Callable[[bytes], Awaitable[None]]) -> bytes:
    """Read the next piece. If it does not come soon, the bytes that the redactor holds back are passed on first."""
    if redactor is not None and redactor.held:
        try:
            async with asyncio.timeout(QUIET_S):
                return await body.piece()
        except TimeoutError:
            await give(redactor.release())
    return await body.piece()


async def forward_both_ways(
    client: ByteStream,
    server: ByteStream,
    sent: Callable[[int], None],
    received: Callable[[int], None],
    redactor: StreamRedactor | None,
) -> None:
    """Forward bytes both ways until the connection ends. The redactor is for the bytes of the server."""
    if isinstance(client, SocketStream) and isinstance(server, SocketStream) and redactor is None:
        for source, sink, count in ((client, server, sent), (server, client, received)):
            rest = source.take(len(source.rest))
            count(len(rest))
            await sink.write(rest)
        await tunnel(client.socket, server.socket, sent, received)
        return
    sending = asyncio.ensure_future(forward(client, server, None, sent))
    receiving = asyncio.ensure_future(forward(server, client, None, received, redactor=redactor))
    try:
        done, _ = await asyncio.wait((sending, receiving), return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()
    finally:
        await cancel((sending, receiving))
