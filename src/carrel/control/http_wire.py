"""One HTTP connection of a client to a peer that is not trusted to keep to the protocol: bounded heads and bodies,
deadlines, and back-pressure in both directions. Knows no route, no address and no pool.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import httptools

from carrel.errors import CarrelError

MAX_HEAD = 16 * 1024
MAX_FIELDS = 100
MAX_PROBLEM = 16 * 1024
HIGH_WATER = 256 * 1024

Lost = Callable[[str], CarrelError]
"""Returns the error for a peer that did something; the text begins with a verb."""


class WireOwner(Protocol):
    """The pool of a connection."""

    def keep(self, wire: HttpWire) -> None:
        """Take back a connection that can be used again."""

    def forget(self, wire: HttpWire) -> None:
        """Drop a connection that cannot. May be called more than once."""


class HttpWire(asyncio.Protocol):
    """One connection, with one exchange at a time. `owner` keeps idle connections; `lost` makes the error for a peer
    that does not keep to the protocol or the limits. With `keeps_headers` the headers of answers are kept.
    """

    def __init__(self, owner: WireOwner, lost: Lost, *, keeps_headers: bool = False):
        self._owner = owner
        self._lost = lost
        self._keeps_headers = keeps_headers
        self._loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self.closed = False
        self._parser: Any = None
        self._waiter: asyncio.Future[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._can_write = True
        self._paused = False
        self._busy = False
        self._bodiless = False
        self.reset(0)

    def reset(self, limit: int) -> None:
        """Prepare for the next exchange; `limit` bounds an answer that is buffered, 0 means a stream."""
        self.limit = limit
        self.status = 0
        self.length: int | None = None
        self.headers_done = False
        self.complete = False
        self.failure: CarrelError | None = None
        self.chunks: deque[bytes] = deque()
        self.headers: list[tuple[bytes, bytes]] = []
        self.buffered = 0
        self._raw = 0
        self._body = 0

    def begin(self, limit: int, *, bodiless: bool = False) -> None:
        """Begin an exchange; `limit` as for `reset`. `bodiless`: its answer has a head only, whatever that says."""
        self.reset(limit)
        self._bodiless = bodiless
        self._parser = httptools.HttpResponseParser(self)
        self._busy = True

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection."""
        self.transport = transport  # type: ignore[assignment]
        transport.set_write_buffer_limits(high=HIGH_WATER)  # type: ignore[attr-defined]

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever waits."""
        self.closed = True
        self._owner.forget(self)
        if not self.complete:
            self.fail(self._lost("went away in the middle of an answer" if self.headers_done else "went away"))
        self._can_write = True
        self._wake()

    def pause_writing(self) -> None:
        """The peer reads too slowly."""
        self._can_write = False

    def resume_writing(self) -> None:
        """The peer has read."""
        self._can_write = True
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def data_received(self, data: bytes) -> None:
        """Parse a piece of the answer."""
        if not self._busy or self.complete:
            self.fail(self._lost("spoke without being asked"))
            return
        self._raw += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.fail(self.failure or self._lost("answered something that is not HTTP"))
            return
        if self.failure is None and self._raw - self._body > MAX_HEAD + 8 * self._body:
            self.fail(self._lost("sent too many headers"))

    # httptools

    def on_message_begin(self) -> None:
        """Refuse a second answer."""
        if self.complete:
            self.fail(self._lost("answered twice"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count and keep a header."""
        if not self.headers_done and name.lower() == b"content-length" and value.isdigit() and len(value) < 19:
            self.length = int(value)
        if self._keeps_headers and not self.headers_done:
            self.headers.append((name.lower(), value))
            if len(self.headers) > MAX_FIELDS:
                self.fail(self._lost("sent too many headers"))

    def on_headers_complete(self) -> None:
        """Check the head of the answer."""
        self.status = self._parser.get_status_code()
        self.headers_done = True
        if self.status < 200:
            self.fail(self._lost("answered something that is not HTTP"))
        elif self.limit and self.length is not None and self.length > self.limit:
            self.fail(self._lost(f"answered more than {self.limit} bytes"))
        elif not self.limit:
            self._wake()
        if self._bodiless and self.failure is None:
            self.complete = True
            if self.transport is not None:
                self.transport.close()

    def on_body(self, body: bytes) -> None:
        """Keep a piece of the body; a stream stops reading while its caller is behind."""
        if self.failure is not None:
            return
        self._body += len(body)
        self.buffered += len(body)
        self.chunks.append(body)
        if self.limit:
            if self.buffered > self.limit:
                self.fail(self._lost(f"answered more than {self.limit} bytes"))
            return
        if self.buffered > HIGH_WATER and not self._paused and self.transport is not None:
            self._paused = True
            self.transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        """End the exchange."""
        self.complete = True
        if not self._parser.should_keep_alive() and self.transport is not None:
            self.transport.close()
        self._wake()

    # the caller's side

    def fail(self, error: CarrelError) -> None:
        """End the exchange with an error, and close the connection."""
        if self.failure is None:
            self.failure = error
        if self.transport is not None and not self.closed:
            self.transport.abort()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self._drained is not None and not self._drained.done() and (self.closed or self.complete):
            self._drained.set_result(None)

    def _late(self) -> None:
        self.fail(self._lost("did not answer in time"))

    async def wait(self, seconds: float | None) -> None:
        """Wait for something to arrive or to fail."""
        self._waiter = self._loop.create_future()
        timer = None if seconds is None else self._loop.call_later(seconds, self._late)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def duplicate(self) -> int:
        """Return a second descriptor of the socket, for `finish`; the caller closes it. -1 where it would be of no use:
        TLS has read what is in the socket.
        """
        assert self.transport is not None
        if self.transport.get_extra_info("ssl_object") is not None:
            return -1
        return os.dup(self.transport.get_extra_info("socket").fileno())

    def _rescue(self, spare: int) -> None:
        """Read a refusal that was sent before the body was taken: it is still in the socket after the write failed."""
        failure, self.failure = self.failure, None
        try:
            self._parser.feed_data(os.read(spare, MAX_HEAD + MAX_PROBLEM))
        except (OSError, httptools.HttpParserError, httptools.HttpParserUpgrade):
            pass
        if not self.complete or self.failure is not None:
            self.failure = failure

    async def finish(self, deadline: float | None, spare: int = -1) -> bytes:
        """Wait for the whole answer."""
        while not self.complete and self.failure is None:
            await self.wait(deadline)
        if self.failure is not None and not self.complete and self.closed and spare >= 0:
            self._rescue(spare)
        if self.failure is not None:
            raise self.failure
        return self.chunks[0] if len(self.chunks) == 1 else b"".join(self.chunks)

    async def head(self, deadline: float | None) -> None:
        """Wait for the head of the answer."""
        while not self.headers_done and self.failure is None:
            await self.wait(deadline)
        if self.failure is not None:
            raise self.failure

    async def body(self, idle: float | None) -> AsyncIterator[bytes]:
        """Yield the body as it comes; reading pauses while the caller is behind."""
        while True:
            while self.chunks:
                chunk = self.chunks.popleft()
                self.buffered -= len(chunk)
                yield chunk
            if self._paused and not self.closed and self.transport is not None:
                self._paused = False
                self.transport.resume_reading()
            if self.complete and not self.chunks:
                return
            if self.failure is not None:
                raise self.failure
            if not self.chunks:
                await self.wait(idle)

    async def drain(self, deadline: float | None) -> None:
        """Wait until the peer has read enough of what was written."""
        while not self._can_write and not self.closed and not self.complete:
            self._drained = self._loop.create_future()
            timer = None if deadline is None else self._loop.call_later(deadline, self._late)
            try:
                await self._drained
            finally:
                self._drained = None
                if timer is not None:
                    timer.cancel()

    def release(self) -> None:
        """Return the connection to the pool if the exchange ended well, else close it."""
        self._busy = False
        self._parser = None
        usable = self.complete and self.failure is None and not self.closed and not self._paused and self._can_write
        # One with TLS takes a moment to close.
        if usable and self.transport is not None and not self.transport.is_closing():
            self._owner.keep(self)
        elif self.transport is not None:
            self.transport.abort()
            self._owner.forget(self)
