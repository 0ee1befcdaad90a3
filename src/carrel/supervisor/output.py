"""What a command has written: kept up to a cap, readable from any offset, and waited for without polling."""

from __future__ import annotations

import asyncio
from bisect import bisect_right

STDOUT, STDERR, END = 1, 2, 0
RUN_COST = 64
"""What it costs to remember where one stream gives way to the other: a program may change between bytes."""


class Budget:
    """Bytes that all outputs of a sandbox may hold together, so that they cannot fill its memory."""

    def __init__(self, limit: int):
        self.limit = self.left = limit


class Output:
    """Both streams of one command in the order they were read. Offsets count the bytes of both together."""

    def __init__(self, limit: int, budget: Budget):
        self._limit = limit
        self._budget = budget
        self._data = bytearray()
        self._starts: list[int] = []  # offset at which each run of one stream starts
        self._streams: list[int] = []
        self._waiting: list[asyncio.Future[None]] = []
        self.dropped = 0
        self.ended = False

    def __len__(self) -> int:
        return len(self._data)

    def add(self, stream: int, data: bytes) -> None:
        """Keep what fits under the cap, count what does not."""
        begins_run = not self._streams or self._streams[-1] != stream
        room = max(0, min(self._limit - len(self._data), self._budget.left - begins_run * RUN_COST))
        if len(data) > room:
            self.dropped += len(data) - room
            data = data[:room]
            self._limit = len(self._data) + room  # what is kept has no gap, also when others free their share
        if data:
            if begins_run:
                self._budget.left -= RUN_COST
                self._starts.append(len(self._data))
                self._streams.append(stream)
            self._data += data
            self._budget.left -= len(data)
        self._wake()

    def end(self) -> None:
        """The command has ended: followers stop at the last byte."""
        self.ended = True
        self._wake()

    def release(self) -> None:
        """Forget everything and give the bytes back to the budget."""
        self._budget.left += len(self._data) + RUN_COST * len(self._streams)
        self._limit = 0
        self._data = bytearray()
        self._starts, self._streams = [], []

    def whole(self) -> tuple[bytes, bytes]:
        """All that was kept of standard output and of standard error."""
        if len(self._streams) <= 1:
            only = bytes(self._data)
            return (b"", only) if self._streams == [STDERR] else (only, b"")
        parts: tuple[list[bytes], list[bytes]] = ([], [])
        for index, stream in enumerate(self._streams):
            stop = self._starts[index + 1] if index + 1 < len(self._starts) else len(self._data)
            parts[stream - 1].append(bytes(self._data[self._starts[index] : stop]))
        return b"".join(parts[0]), b"".join(parts[1])

    def read(self, offset: int, size: int) -> tuple[int, bytes]:
        """The stream at `offset` and its bytes from there on, at most `size`; empty at the end."""
        if offset >= len(self._data):
            return END, b""
        index = bisect_right(self._starts, offset) - 1
        stop = self._starts[index + 1] if index + 1 < len(self._starts) else len(self._data)
        return self._streams[index], bytes(self._data[offset : min(stop, offset + size)])

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
