"""The spellings of a known value: as it is, in base64, in hexadecimal, quoted for a shell. Bytes in, bytes out.

A search for anchors, short literals at the beginning of a spelling, finds candidates; comparing the rest decides.
Percent and backslash escapes are not spellings: they are decoded before the comparison.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from dataclasses import dataclass

SHORTEST = 4
"""The fewest bytes of a secret: shorter ones occur in ordinary text."""

NO, WAIT = 0, -1
"""Results of a comparison other than the end of a match: it is not there, or more bytes are needed."""

WRAPPED = 24
"""A line break inside base64 or hexadecimal digits has at least this many digits before it on its line."""

_ENCODED = re.compile(rb"[A-Za-z0-9+/_-]{%d}" % WRAPPED)
_PLAIN_ANCHOR, _BASE64_ANCHOR, _HEX_ANCHOR = 16, 4, 6
_LINE = 16  # a line of a longer value is a secret too if it has at least this many bytes
_CUT = 8  # a beginning of a secret at the end of a stream is redacted if it has at least this many bytes
_NEAR = 64  # bytes that are compared first
_BREAKS = (b"\n", b"\r\n")


@dataclass(frozen=True, slots=True)
class Spelling:
    """One spelling of a value; `broken` if it may contain line breaks."""

    label: bytes
    body: bytes
    anchor: int
    broken: bool = False

    @property
    def longest(self) -> int:
        """The most bytes of it, including line breaks."""
        return len(self.body) + (2 * (len(self.body) // 16 + 2) if self.broken else 0)

    def anchors(self) -> Iterator[tuple[bytes, int]]:
        """Yield the literals that it can begin with, and how many bytes of each come before a line break."""
        head = self.body[: self.anchor]
        yield head, len(head)
        if self.broken:
            for at in range(1, len(head)):
                for line_break in _BREAKS:
                    yield head[:at] + line_break + head[at:], at

    def revealing_starts(self) -> Iterator[bytes]:
        """Return the beginnings of its anchor that reveal so much that they are redacted at the end of a stream."""
        head = self.body[: self.anchor]
        return (head[:size] for size in range(_CUT, len(head)) if self._reveals(size))

    def match(self, data: bytes, at: int, *, final: bool) -> int:
        """Return the end of the spelling that begins at `at`, or `NO`, or `WAIT`.

        At the end of a stream (`final`), an incomplete spelling matches if it reveals a large part of the value.
        """
        body, size = self.body, len(self.body)
        if data.startswith(body, at):
            return at + size
        if not self.broken:
            rest = len(data) - at
            if rest >= size or not body.startswith(data[at:]):
                return NO
            return WAIT if not final else len(data) if self._reveals(rest) else NO
        if not data.startswith(body[: self.anchor], at) and not is_wrapped(data, at):
            return NO
        # Hostile text may consist of anchors only: a few more bytes rule out most of them.
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
        return WAIT if not final else len(data) if self._reveals(len(joined)) else NO

    def _reveals(self, known: int) -> bool:
        return known >= _CUT and 2 * known >= len(self.body)


def is_wrapped(data: bytes, at: int) -> bool:
    """Whether so many digits come before `at` on its line that a line break may follow."""
    return _ENCODED.fullmatch(data, max(0, at - WRAPPED), at) is not None


def _stretch(window: bytes, size: int) -> int:
    """The number of bytes of `window` that contain `size` bytes besides line breaks."""
    end = size
    while (needed := size + window.count(b"\n", 0, end) + window.count(b"\r", 0, end)) != end:
        end = needed
    return end


def spellings(label: bytes, value: bytes) -> Iterator[Spelling]:
    """Yield every spelling of a value. The value has no blanks around it."""
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
    yield _with_surrogates(value)
    if b"\n" in value:
        yield value.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")  # as a terminal shows it
        for line in value.splitlines():
            text = line.strip()
            if len(text) >= _LINE and not text.startswith(b"-----"):
                yield text


def _with_surrogates(value: bytes) -> bytes:
    """Replace characters beyond the first plane by two surrogates, as JSON escapes them."""
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
    """Yield the base64 of the value for each of its three alignments in a longer text.

    The characters at both ends share bits with the bytes beside the value, so they are left out.
    """
    for shift, first in ((0, 0), (1, 2), (2, 3)):
        whole = base64.b64encode(bytes(shift) + value)[first : (shift + len(value)) * 8 // 6]
        yield whole
        yield whole.translate(bytes.maketrans(b"+/", b"-_"))
