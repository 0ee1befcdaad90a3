"""Output that may be longer than an answer: its beginning and its end, and where the rest is read on.

Pure: chunks and text in, text and offsets out. Knows no connection.
"""

from __future__ import annotations

from carrel.client import Chunk

LIMIT = 50_000
"""The most bytes of output in one answer."""

HEAD = 30_000
_TAIL = LIMIT - HEAD


class Capture:
    """The first bytes and the last bytes of an output, both streams in the order they were written."""

    def __init__(self, offset: int = 0, *, head: int = HEAD, tail: int = _TAIL):
        self.total = 0
        self.last_line = ""
        self.offset = offset
        """The offset after all that was seen."""
        self.left_out = 0
        """How many bytes lie between the beginning and the end that are shown."""
        self.resume = offset
        """The offset at which what was left out begins."""
        self._room = head
        self._keep = tail
        self._head = bytearray()
        self._tail = bytearray()
        self._full = False

    def add(self, chunk: Chunk) -> None:
        """Take the next chunk."""
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
        """What is shown; `marker` stands where something was left out."""
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
    """What is read on from an offset, as far as an answer goes; `offset` is where the next reading starts."""

    def __init__(self, offset: int, *, limit: int = LIMIT):
        self.offset = offset
        self.more = False
        self._limit = limit
        self._data = bytearray()

    @property
    def text(self) -> str:
        """What was read."""
        return decoded(self._data)

    def add(self, chunk: Chunk) -> bool:
        """Take a chunk, or as much as there is room for. False when there is none for more."""
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
    """The last place up to `at` where no character is cut in two, as far as the bytes are UTF-8."""
    if at >= len(data):
        return len(data)
    for place in range(at, max(at - 4, -1), -1):
        if data[place] & 0xC0 != 0x80:
            return place
    return at


def decoded(data: bytes | bytearray) -> str:
    """Bytes as text; what is not UTF-8 is marked."""
    return data.decode("utf-8", "replace")


def cut_middle(text: str, marker: str, *, head: int = HEAD, tail: int = _TAIL) -> str:
    """A text that is too long without its middle."""
    if len(text) <= head + tail:
        return text
    return f"{text[:head]}\n{marker}\n{text[-tail:]}"
