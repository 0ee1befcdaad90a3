"""The log of one MCP server: its standard error, and lines of ours about its starts and ends. Pure: no I/O.

The newest bytes are kept; offsets count all that ever came.
"""

from __future__ import annotations

import codecs
from typing import Any

KEPT = 256 * 1024


class Log:
    """Bytes in, text out."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._data = bytearray()
        self.dropped = 0

    @property
    def size(self) -> int:
        """How many bytes ever came."""
        return self.dropped + len(self._data)

    def add(self, data: bytes) -> None:
        """Keep it; the oldest goes when there is too much."""
        self._data += data
        if (excess := len(self._data) - self._kept) > 0:
            del self._data[:excess]
            self.dropped += excess

    def say(self, words: bytes) -> None:
        """A line of ours, which begins on a line of its own."""
        fresh = b"" if not self._data or self._data.endswith(b"\n") else b"\n"
        self.add(fresh + words.replace(b"\n", b" ") + b"\n")

    def read(self, offset: int, limit: int) -> dict[str, Any]:
        """At most `limit` bytes from an offset on, or from the oldest that is kept, as text."""
        start = max(min(offset, self.size), self.dropped)
        data = self._data[start - self.dropped :][:limit]
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # Where the limit cuts, not in the middle of a character; at least one byte, or a reader would not get on.
        cut = start + len(data) < self.size
        text = decoder.decode(bytes(data), final=not cut)
        waiting = len(decoder.getstate()[0])
        if cut and data and waiting == len(data):
            text, waiting = decoder.decode(b"", final=True), 0
        return {
            "offset": start,
            "next": start + len(data) - waiting,
            "dropped": self.dropped,
            "log_bytes": self.size,
            "text": text,
        }
