"""Standard output of an MCP server, cut into messages: each is one line with a JSON object. Pure: no I/O.

Only the form of a line is looked at, and cheaply; what it says is read by whoever asked. What is kept is bounded,
whatever comes in.
"""

from __future__ import annotations

import codecs
from collections import deque

MOST_LINE = 16 * 1024 * 1024
MOST_OTHER_LINES = 1000
MOST_OTHER_BYTES = 1024 * 1024
"""How much may come in a row that is no message: some servers print words of welcome, or what they log."""
SHOWN = 200

TOO_LONG = f"printed a line longer than {MOST_LINE // (1024 * 1024)} MB"
NO_TEXT = "printed a line that is no UTF-8"
NO_MESSAGE = "prints text that is no MCP message on its standard output"


class Lines:
    """Takes bytes as they come and gives messages. Once `broken` is set (with the reason) it takes no more."""

    def __init__(self) -> None:
        self._messages: deque[bytearray] = deque()
        self._waiting = 0
        self._line = bytearray()  # the beginning of a line whose end has not come; of one that is no message, a little
        self._is_other = False
        self._other_lines = self._other_bytes = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.others: list[bytes] = []
        """The beginnings of lines that are no messages; whoever has shown them clears it."""
        self.broken: str | None = None

    @property
    def held(self) -> int:
        """How many bytes are kept."""
        return self._waiting + len(self._line)

    def take(self) -> bytearray | None:
        """The next message, without blanks around it."""
        if not self._messages:
            return None
        message = self._messages.popleft()
        self._waiting -= len(message)
        return message

    def feed(self, data: bytes) -> None:
        """Take what was printed; messages before a breach are kept."""
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
        """No more will come: the rest is a line that never ended, and no message."""
        if self._line and self.broken is None:
            self.others.append(bytes(self._line[:SHOWN]))
        self._line = bytearray()

    def give_up(self, reason: str) -> None:
        """Take no more."""
        self.broken = self.broken or reason
        self._line = bytearray()

    def _checked(self, data: bytes) -> tuple[bytes, str | None]:
        """What of it is UTF-8, and the breach if that is not all. A character may come in pieces."""
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
        """Blanks count too: a server could print nothing but them, and for ever."""
        self._other_bytes += size
        if self._other_bytes > MOST_OTHER_BYTES:
            self.give_up(NO_MESSAGE)
