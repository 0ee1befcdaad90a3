"""The output of a command: kept up to a limit, readable from any offset; readers wait for more without polling."""

from __future__ import annotations

import asyncio
import os
from bisect import bisect_right
from collections.abc import Callable

STDOUT, STDERR, END, STOPPED = 1, 2, 0, 3
RUN_COST = 64
"""Bytes of the budget for each change between the two streams: a program may change after every byte."""


def read_some(descriptor: int, size: int) -> bytes | None:
    """Read from a pipe or terminal that does not block: None when nothing is there yet, no bytes at its end."""
    try:
        return os.read(descriptor, size)
    except BlockingIOError:
        return None
    except OSError:  # nobody has the other side of a terminal open any more
        return b""


class ByteBudget:
    """The bytes that all outputs of a sandbox may use together, so that they cannot fill its memory."""

    def __init__(self, limit: int):
        self.limit = self.left = limit


class CommandOutput:
    """Both streams of one command in the order they were read. Offsets count the bytes of both together.

    With `on_room` the output is passed on to one reader and not kept: bytes are dropped once they were read. While it
    is `full`, nothing may be added; `on_room` is called when there is room again.
    """

    def __init__(self, limit: int, budget: ByteBudget, on_room: Callable[[], None] | None = None):
        self._limit = limit
        self._budget = budget
        self._on_room = on_room
        self._dropped_before = 0  # bytes that were passed on; offsets count them
        self.stops = 0
        """How often the program was stopped, as by Ctrl-Z."""
        self._data = bytearray()
        self._starts: list[int] = []  # offset at which each run of one stream starts
        self._streams: list[int] = []
        self._waiting: list[asyncio.Future[None]] = []
        self.dropped = 0
        self.ended = False

    def __len__(self) -> int:
        return self._dropped_before + len(self._data)

    @property
    def full(self) -> bool:
        """Whether bytes have to be read before more can be added. Only for an output that is passed on."""
        return self._on_room is not None and len(self._data) >= min(self._limit, self._budget.left)

    def add(self, stream: int, data: bytes) -> None:
        """Keep as many bytes as fit, and count the rest as dropped."""
        begins_run = not self._streams or self._streams[-1] != stream
        limit = self._limit if self._on_room is None else self._budget.limit
        room = max(0, min(limit - len(self._data), self._budget.left - begins_run * RUN_COST))
        if len(data) > room:
            self.dropped += len(data) - room
            data = data[:room]
            self._limit = len(self._data) + room  # no gap in the output, even if other commands free their share
        if data:
            if begins_run:
                self._budget.left -= RUN_COST
                self._starts.append(len(self))
                self._streams.append(stream)
            self._data += data
            self._budget.left -= len(data)
        self._wake()

    def end(self) -> None:
        """Mark the end of the output: followers stop at the last byte."""
        self.ended = True
        self._wake()

    def stopped(self) -> None:
        """Tell the readers that the program was stopped."""
        self.stops += 1
        self._wake()

    def passed(self, offset: int) -> None:
        """Drop the bytes before `offset` if this output is passed on: its reader has them."""
        if self._on_room is None or offset <= self._dropped_before:
            return
        was_full = self.full
        del self._data[: offset - self._dropped_before]
        self._budget.left += offset - self._dropped_before
        self._dropped_before = offset
        runs = bisect_right(self._starts, offset) - 1 if self._data else len(self._starts)
        self._budget.left += RUN_COST * runs
        del self._starts[:runs], self._streams[:runs]
        if was_full and not self.full:
            self._on_room()

    def release(self) -> None:
        """Drop the output and return its bytes to the budget."""
        self._budget.left += len(self._data) + RUN_COST * len(self._streams)
        self._limit = 0
        self._data = bytearray()
        self._starts, self._streams = [], []

    def whole(self) -> tuple[bytes, bytes]:
        """Return standard output and standard error, as far as they were kept."""
        if len(self._streams) <= 1:
            only = bytes(self._data)
            return (b"", only) if self._streams == [STDERR] else (only, b"")
        parts: tuple[list[bytes], list[bytes]] = ([], [])
        for index, stream in enumerate(self._streams):
            stop = self._starts[index + 1] if index + 1 < len(self._starts) else len(self)
            first = self._dropped_before
            parts[stream - 1].append(bytes(self._data[max(0, self._starts[index] - first) : stop - first]))
        return b"".join(parts[0]), b"".join(parts[1])

    def read(self, offset: int, size: int) -> tuple[int, bytes]:
        """Return the stream at `offset` and at most `size` of its bytes; `END` and no bytes at the end."""
        offset = max(offset, self._dropped_before)
        if offset >= len(self):
            return END, b""
        index = bisect_right(self._starts, offset) - 1
        stop = self._starts[index + 1] if index + 1 < len(self._starts) else len(self)
        first = self._dropped_before
        return self._streams[index], bytes(self._data[offset - first : min(stop, offset + size) - first])

    async def changed(self) -> None:
        """Wait for more bytes or for the end."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def _wake(self) -> None:
        if self._waiting:
            for future in self._waiting:
                if not future.done():
                    future.set_result(None)
            self._waiting.clear()
