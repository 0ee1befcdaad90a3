"""Output that may be longer than an answer: keeps its beginning and its end, and the offset of the rest. Pure."""

from __future__ import annotations

from carrel.client import Chunk

LIMIT = 50_000
"""The most bytes of output in one answer."""

HEAD = 30_000
TAIL = LIMIT - HEAD


class Capture:
    """Keeps the first and the last bytes of an output; stdout and stderr in the order they were written."""

    def __init__(self, offset: int = 0, *, head: int = HEAD, tail: int = TAIL):
        self.total = 0
        self.last_line = ""
        self.offset = offset
        """The offset after the last chunk."""
        self.left_out = 0
        """How many bytes in the middle are left out."""
        self.resume = offset
        """The offset at which the left-out bytes begin."""
        self._room = head
        self._keep = tail
        self._head = bytearray()
        self._tail = bytearray()
        self._full = False

    def add(self, chunk: Chunk) -> None:
        """Add the next chunk."""
        before, self.offset = self.offset, chunk.offset
        data = chunk.data
        self.total += len(data)
        self._note(data)
        if not self._full:
            # Redaction changes lengths, so offsets are only valid for chunks that were not redacted.
            exact = chunk.offset - before == len(data)
            cut = len(data) if len(data) <= self._room else (boundary(data, self._room) if exact else 0)
            self._head += data[:cut]
            self._room -= cut
            self._full = cut < len(data)
            self.resume = before + cut if self._full else chunk.offset
            data = data[cut:]
        self._tail += data
        if len(self._tail) > self._keep:
            self._trim()

    def text(self, marker: str) -> str:
        """Return the text, with `marker` where bytes were left out."""
        if not self.left_out:
            return decoded(self._head + self._tail)
        return f"{decoded(self._head)}\n{marker}\n{decoded(self._tail)}"

    def _trim(self) -> None:
        cut = len(self._tail) - self._keep
        while cut < len(self._tail) and self._tail[cut] & 0xC0 == 0x80:
            cut += 1
        del self._tail[:cut]
        self.left_out += cut

    def _note(self, data: bytes) -> None:
        lines = data[-400:].decode("utf-8", "replace").strip().splitlines()
        if lines:
            self.last_line = lines[-1][-200:]


class Reading:
    """Reads as much from an offset as fits into an answer; afterwards `offset` is where to continue."""

    def __init__(self, offset: int, *, limit: int = LIMIT):
        self.offset = offset
        self.more = False
        self._limit = limit
        self._data = bytearray()

    @property
    def text(self) -> str:
        """The text that was read."""
        return decoded(self._data)

    def add(self, chunk: Chunk) -> bool:
        """Add a chunk, or as much as fits. Returns False when the answer is full."""
        room = self._limit - len(self._data)
        self.more = len(chunk.data) > room
        if self.more and chunk.offset - self.offset == len(chunk.data):
            cut = boundary(chunk.data, room)
            self._data += chunk.data[:cut]
            self.offset += cut
        elif not (self.more and self._data):  # a redacted chunk cannot be cut: a first one is given whole
            self._data += chunk.data
            self.offset = chunk.offset
        return not self.more


def boundary(data: bytes, at: int) -> int:
    """Return the last position up to `at` that does not cut a UTF-8 character in two."""
    if at >= len(data):
        return len(data)
    for place in range(at, max(at - 4, -1), -1):
        if data[place] & 0xC0 != 0x80:
            return place
    return at


def decoded(data: bytes | bytearray) -> str:
    """Decode bytes; those that are not UTF-8 are replaced."""
    return data.decode("utf-8", "replace")
