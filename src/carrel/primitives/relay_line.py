"""A connection between two machines that carries one stream of bytes after another, between a local connection here and
one there. So a machine that nobody may connect from can still have its connections carried out: the other side has
opened the line, and takes them from it.

Each message has a kind and a number. `BEGIN` starts a stream: the number says how many more wait for a line. `DATA` has
as many bytes; `END` says that no more of this stream follow in this direction. After both sides' `END` the line is idle
again. What a peer sends is hostile input: a message that does not fit ends the line, and nothing is kept but the bytes
of one read. Where a reader is slow, the writer waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import IntEnum
from typing import Protocol, cast

HELLO = b"carrel-relay\n"
"""What the side that has opened the line sends first."""
MOST_WAITING = 0xFFFF
_HEAD = 5
_HIGH_WATER = 256 * 1024


class RelayMessage(IntEnum):
    """The kinds of messages."""

    BEGIN = 1
    DATA = 2
    END = 3


def message(kind: RelayMessage, number: int = 0) -> bytes:
    """Return the head of a message."""
    return bytes((kind,)) + number.to_bytes(_HEAD - 1, "big")


class RelayReader:
    """Takes messages apart, in whatever pieces they come. The bytes of `DATA` are passed on as they come."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._left = 0

    def read(self, data: bytes) -> list[tuple[RelayMessage, int | bytes]]:
        """Return what has come: `BEGIN` with its number, `DATA` with bytes, `END`. Raises `ValueError`."""
        found: list[tuple[RelayMessage, int | bytes]] = []
        at = 0
        while at < len(data):
            if self._left:
                part = data[at : at + self._left]
                self._left -= len(part)
                at += len(part)
                found.append((RelayMessage.DATA, part))
                continue
            part = data[at : at + _HEAD - len(self._head)]
            self._head += part
            at += len(part)
            if len(self._head) == _HEAD:
                kind, number = RelayMessage(self._head[0]), int.from_bytes(self._head[1:], "big")
                self._head.clear()
                if kind is RelayMessage.DATA:
                    self._left = number
                else:
                    found.append((kind, number))
        return found


class LineOwner(Protocol):
    """Who keeps the lines."""

    def idle(self, line: RelayLine) -> None:
        """Take note that a stream has ended well: the line can carry the next one."""

    def begun(self, line: RelayLine, waiting: int) -> None:
        """Take note that the peer has begun a stream: call `carry`."""

    def lost(self, line: RelayLine) -> None:
        """Take note that the line has ended."""


class RelayLine(asyncio.Protocol):
    """One end of a line."""

    def __init__(self, owner: LineOwner, *, begins: bool):
        """`begins`: streams begin on this side."""
        self._owner = owner
        self._begins = begins
        self._reader = RelayReader()
        self._transport: asyncio.Transport | None = None
        self._local: _Local | None = None
        self._over: asyncio.Future[None] | None = None
        self._early: list[bytes] = []
        self._sent_end = self._got_end = True
        self._full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        self._transport = cast(asyncio.Transport, transport)  # with TLS, that of uvloop does not derive from it
        self._transport.set_write_buffer_limits(high=_HIGH_WATER)

    @property
    def is_idle(self) -> bool:
        """Whether a stream can begin."""
        return self._transport is not None and self._sent_end and self._got_end

    def hello(self) -> bool:
        """Make the connection a line, on the side that has opened it. False if it has ended already."""
        self._write(HELLO)
        return self._transport is not None

    def begin(self, waiting: int) -> None:
        """Begin a stream. Call `carry` next."""
        assert self._begins and self.is_idle
        self._open()
        self._write(message(RelayMessage.BEGIN, min(waiting, MOST_WAITING)))

    async def carry(self, connect: Callable[[Callable[[], asyncio.Protocol]], Awaitable[object]]) -> None:
        """Carry a stream until it has ended. `connect` makes the local connection with a protocol. A failure ends the
        line too, and is raised if it is that of `connect`.
        """
        over = self._over
        if over is None:
            return  # the line was lost meanwhile
        try:
            await connect(lambda: _Local(self))
            await over
        except BaseException:
            self.abort()
            raise

    def close(self) -> None:
        """End the line once everything is sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End the line at once."""
        if self._transport is not None:
            self._transport.abort()

    def _open(self) -> None:
        self._sent_end = self._got_end = False
        self._over = asyncio.get_running_loop().create_future()

    # what comes over the line

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        try:
            for kind, what in self._reader.read(data):
                self._take(kind, what)
        except ValueError:
            self.abort()

    def _take(self, kind: RelayMessage, what: int | bytes) -> None:
        if kind is RelayMessage.BEGIN and isinstance(what, int):
            if self._begins or not self.is_idle or what > MOST_WAITING:
                raise ValueError("a stream cannot begin now")
            self._open()
            self._owner.begun(self, what)
        elif self._got_end:
            raise ValueError("there is no stream")
        elif isinstance(what, bytes):
            if self._local is not None:
                self._local.write(what)
            else:
                self._early.append(what)
                self._pause()
        elif kind is RelayMessage.END:
            self._got_end = True
            if self._local is not None:
                self._local.end()
            self._end_stream()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        self._transport = None
        self._sent_end = self._got_end = True
        self._early.clear()
        local, self._local = self._local, None
        if local is not None:
            local.cut()
        self._finish()
        self._owner.lost(self)

    def pause_writing(self) -> None:
        """Called by asyncio when the peer reads too slowly."""
        self._full = True
        if self._local is not None:
            self._local.pause()

    def resume_writing(self) -> None:
        """Called by asyncio when there is room again."""
        self._full = False
        if self._local is not None:
            self._local.resume()

    # what comes over the local connection

    def join(self, local: _Local) -> None:
        """Take the local connection of a stream, and give it what has come before."""
        if self._over is None:  # the line was lost meanwhile
            local.cut()
            return
        self._local = local
        if self._full:
            local.pause()
        for data in self._early:
            local.write(data)
        self._early.clear()
        if self._got_end:
            local.end()
        self.resume()

    def send(self, data: bytes) -> None:
        """Send bytes of the local connection."""
        if self._transport is not None and not self._sent_end:
            self._transport.writelines((message(RelayMessage.DATA, len(data)), data))

    def send_end(self) -> None:
        """Say that no more bytes follow."""
        if not self._sent_end:
            self._sent_end = True
            self._write(message(RelayMessage.END))
            self._end_stream()

    def leave(self) -> None:
        """End the line: the local connection was lost before its stream has ended."""
        self._local = None
        self.close()

    def pause(self) -> None:
        """Read nothing from the line for now."""
        self._pause()

    def resume(self) -> None:
        """Read from the line again."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _pause(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _end_stream(self) -> None:
        """Become idle, if both directions have ended."""
        local = self._local
        if not (self._sent_end and self._got_end) or local is None:
            return
        self._local = None
        local.close()
        self.resume()
        self._finish()
        if self._transport is not None and not self._transport.is_closing():
            self._owner.idle(self)

    def _finish(self) -> None:
        over, self._over = self._over, None
        if over is not None and not over.done():
            over.set_result(None)


class _Local(asyncio.Protocol):
    """The connection on this machine whose stream a line carries."""

    def __init__(self, line: RelayLine):
        self._line: RelayLine | None = line
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._line is not None:
            self._line.join(self)

    def data_received(self, data: bytes) -> None:
        if self._line is not None:
            self._line.send(data)

    def eof_received(self) -> bool:
        if self._line is not None:
            self._line.send_end()
        return True  # the other direction goes on

    def connection_lost(self, exc: Exception | None) -> None:
        line, self._line, self._transport = self._line, None, None
        if line is not None:
            line.leave()

    def pause_writing(self) -> None:
        if self._line is not None:
            self._line.pause()

    def resume_writing(self) -> None:
        if self._line is not None:
            self._line.resume()

    # for the line

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def end(self) -> None:
        if self._transport is not None and self._transport.can_write_eof():
            self._transport.write_eof()

    def pause(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self) -> None:
        """Close it once everything is written: its stream has ended."""
        self._line = None
        if self._transport is not None:
            self._transport.close()

    def cut(self) -> None:
        """Close it at once: its line was lost."""
        self._line = None
        if self._transport is not None:
            self._transport.abort()
