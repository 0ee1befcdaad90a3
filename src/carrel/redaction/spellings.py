"""How a known value may be written: as it is, in base64, in hexadecimal, quoted for a shell. Bytes in, bytes out.

A spelling is found by anchors, short literals that it begins with, and decided by comparing the rest. Spellings that
differ byte by byte (percent and backslash escapes) are not here: they are undone before anything is compared.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from dataclasses import dataclass

SHORTEST = 4
"""Bytes of the shortest value that can be told from ordinary text."""

NO, WAIT = 0, -1
"""What a comparison says beside the end of what it found: it is not there, or more bytes have to come."""

WRAPPED = 24
"""Bytes on the same line before a break, without which it is no break inside base64 or hexadecimal digits."""

_ENCODED = re.compile(rb"[A-Za-z0-9+/_-]{%d}" % WRAPPED)
_PLAIN_ANCHOR, _BASE64_ANCHOR, _HEX_ANCHOR = 16, 4, 6
_LINE = 16  # the shortest line of a longer value that is a secret of its own
_CUT = 8  # bytes of a beginning at the very end that tell too much
_NEAR = 64  # bytes that are looked at before all that a value may take are
_BREAKS = (b"\n", b"\r\n")


@dataclass(frozen=True, slots=True)
class Spelling:
    """One way of writing a value; `broken` when breaks of lines may stand inside."""

    label: bytes
    body: bytes
    anchor: int
    broken: bool = False

    @property
    def longest(self) -> int:
        """Bytes it can take with its breaks."""
        return len(self.body) + (2 * (len(self.body) // 16 + 2) if self.broken else 0)

    def anchors(self) -> Iterator[tuple[bytes, int]]:
        """The literals it can begin with, and how much of each comes before a break."""
        head = self.body[: self.anchor]
        yield head, len(head)
        if self.broken:
            for at in range(1, len(head)):
                for line_break in _BREAKS:
                    yield head[:at] + line_break + head[at:], at

    def telling_starts(self) -> Iterator[bytes]:
        """The parts of its anchor that tell so much that they count when nothing more comes."""
        head = self.body[: self.anchor]
        return (head[:size] for size in range(_CUT, len(head)) if self._tells(size))

    def match(self, data: bytes, at: int, *, final: bool) -> int:
        """The end of the spelling that begins at `at`, or `NO`, or `WAIT`.

        When nothing more comes (`final`), a beginning that was cut off counts if it tells a good part of the value.
        """
        body, size = self.body, len(self.body)
        if data.startswith(body, at):
            return at + size
        if not self.broken:
            rest = len(data) - at
            if rest >= size or not body.startswith(data[at:]):
                return NO
            return WAIT if not final else len(data) if self._tells(rest) else NO
        if not data.startswith(body[: self.anchor], at) and not is_wrapped(data, at):
            return NO
        # Text may be made of nothing but anchors: most of what is not there is told by a few bytes more.
        near = data[at : at + _NEAR].translate(None, b"\r\n")
        if not near.startswith(body) and not body.startswith(near):
            return NO
        room = self.longest
        window = data[at : at + room]
        joined = window.translate(None, b"\r\n")
        if joined.startswith(body):
            return at + _stretch(window, size)
        if len(window) == room or not body.startswith(joined):
            return NO
        return WAIT if not final else len(data) if self._tells(len(joined)) else NO

    def _tells(self, known: int) -> bool:
        return known >= _CUT and 2 * known >= len(self.body)


def is_wrapped(data: bytes, at: int) -> bool:
    """Whether what begins at `at` goes on from a long line, which may be broken just after."""
    return _ENCODED.fullmatch(data, max(0, at - WRAPPED), at) is not None


def _stretch(window: bytes, size: int) -> int:
    """How many bytes of `window` hold `size` bytes that are no breaks."""
    end = size
    while (needed := size + window.count(b"\n", 0, end) + window.count(b"\r", 0, end)) != end:
        end = needed
    return end


def spellings(label: bytes, value: bytes) -> Iterator[Spelling]:
    """Every way to write a value that is here to be found. The value has no blanks around it."""
    for text in dict.fromkeys(_plain(value)):
        yield Spelling(label, text, _PLAIN_ANCHOR)
    for text in dict.fromkeys(_base64(value)):
        yield Spelling(label, text, _BASE64_ANCHOR, broken=True)
    for text in dict.fromkeys((value.hex().encode(), value.hex().upper().encode())):
        yield Spelling(label, text, _HEX_ANCHOR, broken=True)


def _plain(value: bytes) -> Iterator[bytes]:
    yield value
    yield value.replace(b" ", b"+")  # as forms write it
    yield value.replace(b"'", b"'\\''")
    yield value.replace(b"'", b"'\"'\"'")
    yield _halves(value)
    if b"\n" in value:
        yield value.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")  # as a terminal shows it
        for line in value.splitlines():
            text = line.strip()
            if len(text) >= _LINE and not text.startswith(b"-----"):
                yield text


def _halves(value: bytes) -> bytes:
    """Characters beyond the first plane as two surrogates, which is how JSON escapes them."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return value
    if text.isascii() or max(text) <= "\uffff":
        return value
    pairs = text.encode("utf-16-be", "surrogatepass")
    units = (pairs[at : at + 2].decode("utf-16-be", "surrogatepass") for at in range(0, len(pairs), 2))
    return "".join(units).encode("utf-8", "surrogatepass")


def _base64(value: bytes) -> Iterator[bytes]:
    """What base64 makes of the value wherever it stands in something longer.

    The characters at both ends share their bits with what stands beside the value, so they are left out.
    """
    for shift, first in ((0, 0), (1, 2), (2, 3)):
        whole = base64.b64encode(bytes(shift) + value)[first : (shift + len(value)) * 8 // 6]
        yield whole
        yield whole.translate(bytes.maketrans(b"+/", b"-_"))
