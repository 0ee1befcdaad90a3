"""What was let out and is not yet written down, in a file: a proxy that is killed has let nothing out unseen.

A line is written before a connection goes out, and another when the control plane has it. Whoever comes after a killed
proxy finds what is between. It is as safe as the page cache: a killed process loses nothing, a lost machine the last
moment.
"""

from __future__ import annotations

import errno
import logging
import marshal
import os
from collections.abc import Iterable
from typing import Any

log = logging.getLogger("carrel.egress")

Item = dict[str, object]

MOST_BYTES = 8 << 20
"""A longer journal is written anew, with what is still open in it."""
_LENGTH = 4
_FORMAT = 2  # later ones look for what is there twice, which takes longer than it saves


class Journal:
    """The journal of one process. `left` is what the process before it was not sure of."""

    def __init__(self, path: str, *, most_bytes: int = MOST_BYTES):
        self._path = path
        self._most = most_bytes
        self._open, self.last = read(path)
        self.left = list(self._open.values())
        self._file = -1
        self._size = self._least = 0
        self._rewrite()

    def opened(self, number: int, item: Item) -> None:
        """It is about to go out. Raises `OSError`: then it must not."""
        self._write((number, item))
        self._open[number] = item
        self.last = number

    def written(self, numbers: Iterable[int]) -> None:
        """They are written down."""
        done = [number for number in numbers if self._open.pop(number, None) is not None]
        if done:
            self._write(done)
        if self._size > max(self._most, 2 * self._least):
            self._rewrite()

    def close(self) -> None:
        """Let go of the file; one without anything in it goes too."""
        os.close(self._file)
        if not self._open:
            os.unlink(self._path)

    def _write(self, entry: Any) -> None:
        """Add a line. Where there is no room for the whole of it, nothing of it stays."""
        line = _line(entry)
        if (written := os.write(self._file, line)) < len(line):
            os.ftruncate(self._file, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += written

    def _rewrite(self) -> None:
        """Into a new file, which takes the place of the old one once it is whole."""
        lines = b"".join(map(_line, (self.last, *self._open.items())))
        draft = f"{self._path}.new"
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            if os.write(file, lines) < len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.rename(draft, self._path)
        except BaseException:
            os.close(file)
            raise
        if self._file >= 0:
            os.close(self._file)
        self._file, self._size, self._least = file, len(lines), len(lines)


def _line(entry: Any) -> bytes:
    data = marshal.dumps(entry, _FORMAT)
    return len(data).to_bytes(_LENGTH, "little") + data


def read(path: str) -> tuple[dict[int, Item], int]:
    """What is open in a journal, and the last number in it. What was cut off at its end is left out, and so is all that
    follows a line that cannot be read: a machine that lost its power may have left anything there.
    """
    found: dict[int, Item] = {}
    last = 0
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return found, last
    at = 0
    while at + _LENGTH <= len(data):
        size = int.from_bytes(data[at : at + _LENGTH], "little")
        piece = data[at + _LENGTH : at + _LENGTH + size]
        at += _LENGTH + size
        if len(piece) < size:
            break
        try:
            entry = marshal.loads(piece)  # noqa: S302 - its own file, in a directory that only the server's user has
            if isinstance(entry, int):
                last = max(last, entry)
            elif isinstance(entry, list):
                for number in entry:
                    found.pop(number, None)
            else:
                number, item = entry
                found[number] = item
                last = max(last, number)
        except (ValueError, EOFError, TypeError):
            log.warning("the journal of the access log is damaged: what follows byte %d of it is lost", at)
            break
    return found, last
