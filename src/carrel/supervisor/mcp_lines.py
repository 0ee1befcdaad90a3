"""Splits the standard output of an MCP server into messages: each is one line with a JSON object. Pure: no I/O.

Only the form of a line is checked; the caller parses it. Memory is bounded for any input.
"""

from __future__ import annotations

import codecs
from collections import deque

MOST_LINE = 16 * 1024 * 1024
MOST_OTHER_LINES = 1000
MOST_OTHER_BYTES = 1024 * 1024
"""How much other text may come between two messages: some servers print a greeting, or log to standard output."""
SHOWN = 200

TOO_LONG = f"printed a line longer than {MOST_LINE // (1024 * 1024)} MB"
NO_TEXT = "printed a line that is no UTF-8"
NO_MESSAGE = "prints text that is no MCP message on its standard output"


class MessageLines:
    """Turns bytes into messages. Once `broken` is set, with the reason, further input is ignored."""

    def __init__(self) -> None:
        self._messages: deque[bytearray] = deque()
        self._waiting = 0
        self._line = bytearray()  # the unfinished line; of a line that is no message only the first bytes
        self._is_other = False
        self._other_lines = self._other_bytes = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.others: list[bytes] = []
        """The beginnings of lines that are not messages. The caller logs them and clears the list."""
        self.broken: str | None = None

    @property
    def held(self) -> int:
        """The number of bytes in memory."""
        return self._waiting + len(self._line)

    def take(self) -> bytearray | None:
        """Return the next message without surrounding white space, or None."""
        if not self._messages:
            return None
        message = self._messages.popleft()
        self._waiting -= len(message)
        return message

    def feed(self, data: bytes) -> None:
        """Take output of the server. Messages that came before an error are kept."""
        if self.broken is not None:
            return
        text, breach = self._checked(data)
        *whole, rest = text.split(b"\n")
        for piece in whole:
            self._add(piece)
            self._end_line()
        self._add(rest)
        if breach is not None:
            self.give_up(breach)

    def finish(self) -> None:
        """End the input: the rest is an unfinished line and not a message."""
        if self._line and self.broken is None:
            self.others.append(bytes(self._line[:SHOWN]))
        self._line = bytearray()

    def give_up(self, reason: str) -> None:
        """Ignore all further input, for this reason."""
        self.broken = self.broken or reason
        self._line = bytearray()

    def _checked(self, data: bytes) -> tuple[bytes, str | None]:
        """Return the part that is UTF-8, and an error if that is not all. A character may come in pieces."""
        before = len(self._decoder.getstate()[0])
        if not before and data.isascii():
            return data, None
        try:
            self._decoder.decode(data)
        except UnicodeDecodeError as error:
            return data[: max(0, error.start - before)], NO_TEXT
        return data, None

    def _add(self, piece: bytes) -> None:
        if self.broken is not None:
            return
        if not self._line:
            stripped = piece.lstrip()
            self._count(len(piece) - len(stripped))
            piece = stripped
            self._is_other = not piece.startswith(b"{")
        if not piece:
            return
        if self._is_other:
            self._count(len(piece))
            piece = piece[: max(0, SHOWN - len(self._line))]
        elif len(self._line) + len(piece) > MOST_LINE:
            self.give_up(TOO_LONG)
            return
        self._line += piece

    def _end_line(self) -> None:
        line, self._line = self._line, bytearray()
        if self.broken is not None:
            return
        self._count(1)
        if line and line[-1:].isspace():
            line = line.rstrip()
        if line and not self._is_other and line.endswith(b"}"):
            self._other_lines = self._other_bytes = 0
            self._messages.append(line)
            self._waiting += len(line)
        elif line:
            if not self._is_other:
                self._count(len(line))
            self.others.append(bytes(line[:SHOWN]))
            self._other_lines += 1
            if self._other_lines > MOST_OTHER_LINES:
                self.give_up(NO_MESSAGE)

    def _count(self, size: int) -> None:
        """Count bytes that are not part of a message. White space counts: a server could print it for ever."""
        self._other_bytes += size
        if self._other_bytes > MOST_OTHER_BYTES:
            self.give_up(NO_MESSAGE)
