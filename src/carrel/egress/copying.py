"""Copies bytes between two sockets, one way or both ways, and counts them. Memory use is bounded.

Does not look at the bytes. Works on raw non-blocking sockets and closes neither.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from collections.abc import Callable
from contextlib import suppress

from carrel.egress.access import AccessRefused
from carrel.egress.sockets import IDLE_S, Ended, Undeliverable

SIZE = 256 * 1024
BIG = 1 << 20
"""After this many bytes, a flow continues through a pipe, which the kernel fills and empties without copying: measured,
this takes half the processor time of a buffer. For a short flow, creating the pipe costs more than it saves.
"""
MOST_PIPES = 64
"""More would exceed the kernel's pipe limit for an ordinary user. Further flows use the buffer."""

_PIPE = 1 << 20
_SPLICE = 1 | 2  # move pages rather than copy; do not wait

# All flows share one buffer: it is filled and emptied without waiting in between.
_buffer = memoryview(bytearray(SIZE))
_pipes: set[_Pipe] = set()


class _Pipe:
    """A kernel pipe that holds bytes in transit."""

    def __init__(self) -> None:
        self.out, self.into = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.fcntl(self.into, fcntl.F_SETPIPE_SZ, _PIPE)
        except BaseException:
            self.close()
            raise
        _pipes.add(self)

    def close(self) -> None:
        _pipes.discard(self)
        os.close(self.out)
        os.close(self.into)


class _Flow:
    """Copies from one socket to another, until the source ends or `most` bytes were copied.

    Then calls `ended` once, with None, or with the error that stopped it.
    """

    def __init__(
        self,
        source: socket.socket,
        sink: socket.socket,
        count: Callable[[int], None],
        ended: Callable[[_Flow, Exception | None], None],
        most: int | None = None,
    ):
        self._loop = asyncio.get_running_loop()
        self._source, self.sink = source, sink
        self._count = count
        self._ended = ended
        self._left = most
        self._rest = memoryview(b"")
        self._until_big = BIG
        self._pipe: _Pipe | None = None
        self._piped = 0
        self._writing = False
        self._reading = True
        self.last = self._loop.time()
        """When bytes last moved."""
        self._loop.add_reader(source.fileno(), self._pump)

    def stop(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._source.fileno())
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self.sink.fileno())
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    def _pump(self) -> None:
        try:
            if self._until_big <= 0 and self._pipe is None:
                self._grow()
            size = self._take()
            if not size:
                self._end(None if self._left is None else Ended("the source has ended too early"))
                return
            self.last = self._loop.time()
            self._count(size)
            if self._left is not None:
                self._left -= size
            if not self._give():
                self._rest = memoryview(bytes(self._rest))
                self._wait_for_sink()
            elif self._left == 0:
                self._end(None)
        except BlockingIOError:
            return
        except (OSError, AccessRefused) as error:
            self._end(error)

    def _take(self) -> int:
        """Read from the source; return the number of bytes."""
        if self._pipe is None:
            size = self._source.recv_into(_buffer, SIZE if self._left is None else min(SIZE, self._left))
            self._rest = _buffer[:size]
            self._until_big -= size
        else:
            most = _PIPE if self._left is None else min(_PIPE, self._left)
            size = self._piped = os.splice(self._source.fileno(), self._pipe.into, most, flags=_SPLICE)
        return size

    def _give(self) -> bool:
        """Write to the sink; return whether it took everything."""
        try:
            if self._pipe is None:
                self._rest = self._rest[self.sink.send(self._rest) :]
            else:
                self._piped -= os.splice(self._pipe.out, self.sink.fileno(), self._piped, flags=_SPLICE)
        except BlockingIOError:
            return False
        except OSError as error:
            raise Undeliverable(*error.args) from None
        return not self._rest and not self._piped

    def _grow(self) -> None:
        self._until_big = BIG
        if len(_pipes) < MOST_PIPES:
            with suppress(OSError):  # no pipe is available now: go on with the buffer and try again later
                self._pipe = _Pipe()

    def _wait_for_sink(self) -> None:
        self._reading, self._writing = False, True
        self._loop.remove_reader(self._source.fileno())
        self._loop.add_writer(self.sink.fileno(), self._flush)

    def _flush(self) -> None:
        try:
            done = self._give()
        except OSError as error:
            self._end(error)
            return
        self.last = self._loop.time()
        if not done:
            return
        self._writing = False
        self._loop.remove_writer(self.sink.fileno())
        if self._left == 0:
            self._end(None)
        else:
            self._reading = True
            self._loop.add_reader(self._source.fileno(), self._pump)

    def _end(self, error: Exception | None) -> None:
        self.stop()
        self._ended(self, error)


class _FlowWatch:
    """Waits until all flows have ended, one has failed, or no byte has moved for `idle_s`."""

    def __init__(self, idle_s: float, *, pass_on: bool):
        self._loop = asyncio.get_running_loop()
        self._idle_s = idle_s
        self._pass_on = pass_on
        self._flows: list[_Flow] = []
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._running = 0

    def add(
        self, source: socket.socket, sink: socket.socket, count: Callable[[int], None], most: int | None = None
    ) -> None:
        self._running += 1
        self._flows.append(_Flow(source, sink, count, self._ended, most))

    async def wait(self) -> None:
        """Raise the error of the flow that failed, or `TimeoutError`."""
        self._timer = self._loop.call_later(self._idle_s, self._tick)
        try:
            await self._done
        finally:
            self._timer.cancel()
            for flow in self._flows:
                flow.stop()

    def _tick(self) -> None:
        left = max(flow.last for flow in self._flows) + self._idle_s - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._tick)
        elif not self._done.done():
            self._done.set_exception(TimeoutError("nothing has moved for too long"))

    def _ended(self, flow: _Flow, error: Exception | None) -> None:
        if self._done.done():
            return
        if isinstance(error, ConnectionError) and self._pass_on and self._running < len(self._flows):
            error = None  # a peer that has ended may not read what the other still sends
        if error is not None:
            self._done.set_exception(error)
            return
        if self._pass_on:
            with suppress(OSError):
                flow.sink.shutdown(socket.SHUT_WR)
        self._running -= 1
        if not self._running:
            self._done.set_result(None)


async def copy(
    source: socket.socket,
    sink: socket.socket,
    count: Callable[[int], None],
    *,
    most: int | None = None,
    idle_s: float = IDLE_S,
) -> None:
    """Copy one way: `most` bytes, or until the source ends. Raises `Ended` when it ends too early, `Undeliverable` when
    the sink takes no more, `OSError`, `TimeoutError` or, from `count`, `AccessRefused`.
    """
    if most == 0:
        return
    watch = _FlowWatch(idle_s, pass_on=False)
    watch.add(source, sink, count, most)
    await watch.wait()


async def tunnel(
    client: socket.socket,
    upstream: socket.socket,
    sent: Callable[[int], None],
    received: Callable[[int], None],
    *,
    idle_s: float = IDLE_S,
) -> None:
    """Copy both ways until both sides have ended. The end of one side is passed on, and the other may continue.

    Raises as `copy` does.
    """
    watch = _FlowWatch(idle_s, pass_on=True)
    watch.add(client, upstream, sent)
    watch.add(upstream, client, received)
    await watch.wait()
