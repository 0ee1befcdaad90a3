"""The log of one MCP server: its standard error, and our own lines about its starts and ends. Pure: no I/O.

The newest bytes are kept. Offsets count all bytes since the beginning.
"""

from __future__ import annotations

import codecs
from typing import Any

KEPT = 256 * 1024


class Log:
    """A bounded log: bytes in, text out."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._data = bytearray()
        self.dropped = 0

    @property
    def size(self) -> int:
        """The number of bytes since the beginning, dropped ones included."""
        return self.dropped + len(self._data)

    def add(self, data: bytes) -> None:
        """Add bytes, and drop the oldest when there are too many."""
        self._data += data
        if (excess := len(self._data) - self._kept) > 0:
            del self._data[:excess]
            self.dropped += excess

    def say(self, words: bytes) -> None:
        """Add a line of our own, which always begins on a new line."""
        fresh = b"" if not self._data or self._data.endswith(b"\n") else b"\n"
        self.add(fresh + words.replace(b"\n", b" ") + b"\n")

    def read(self, offset: int, limit: int) -> dict[str, Any]:
        """Return at most `limit` bytes as text, from an offset on or from the oldest byte that is kept."""
        start = max(min(offset, self.size), self.dropped)
        data = self._data[start - self.dropped :][:limit]
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # The limit never cuts inside a character. At least one byte is returned, or a reader would make no progress.
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
