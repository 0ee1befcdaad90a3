"""Decodes percent and backslash escapes, and maps positions in the decoded text to positions in the escaped text.

Knows the escapes of URLs, JSON, shells and programming languages; knows nothing of secrets.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

LONGEST = 6
"""The most bytes of one escape."""
_NEAR = 1024
_PERCENT = re.compile(rb"%[0-9A-Fa-f]{2}")
_PERCENT_BEGUN = re.compile(rb"%[0-9A-Fa-f]?\Z")
_BACKSLASH = re.compile(rb"\\(?:u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2}|[0-7]{1,3}|(?s:.))")
_BACKSLASH_BEGUN = re.compile(rb"\\(?:u[0-9A-Fa-f]{0,3}|x[0-9A-Fa-f]?|[0-7]{1,2})?\Z")
_NAMED = {
    b"\\" + bytes([key]): bytes([code]) for key, code in zip(b"abtnvfreE", b"\a\b\t\n\v\f\r\x1b\x1b", strict=True)
}

_HEX = "0123456789abcdefABCDEF"
_PERCENTS = {f"%{high}{low}".encode(): bytes([int(high + low, 16)]) for high in _HEX for low in _HEX}


def _decode_percents(data: bytes) -> bytes:
    return _PERCENT.sub(lambda found: _PERCENTS[found[0]], data)


def _backslash(unit: bytes) -> bytes:
    kind = unit[1:2]
    if len(unit) == 6 and kind == b"u":
        return chr(int.from_bytes(bytes.fromhex(unit[2:].decode()))).encode("utf-8", "surrogatepass")
    if len(unit) == 4 and kind == b"x":
        return bytes.fromhex(unit[2:].decode())
    if kind.isdigit() and kind < b"8":
        return bytes([int(unit[1:], 8) & 255])
    return _NAMED.get(unit, kind)


_SHORT = {unit: _backslash(unit) for unit in (b"\\" + bytes([code]) for code in range(256))}


# The usual escapes are replaced kind by kind, which is much faster than one by one. Before that, every pair of
# backslashes is set aside; `replace` pairs the backslashes of a run from the left, as a reader does.
_USUAL = tuple((b"\\" + key, _SHORT[b"\\" + key]) for key in (b'"', b"n", b"/", b"t", b"r", b"'"))
_PAIR, _SET_ASIDE = b"\\\\", b"\\\0"


def _decode_backslashes(data: bytes) -> bytes:
    if _SET_ASIDE in data:
        return _BACKSLASH.sub(lambda found: _SHORT.get(found[0]) or _backslash(found[0]), data)
    data = data.replace(_PAIR, _SET_ASIDE)
    for unit, meaning in _USUAL:
        data = data.replace(unit, meaning)
    if data.count(b"\\") == data.count(_SET_ASIDE):
        return data.replace(_SET_ASIDE, b"\\")
    return _BACKSLASH.sub(
        lambda found: b"\\" if found[0] == _SET_ASIDE else _SHORT.get(found[0]) or _backslash(found[0]), data
    )


@dataclass(frozen=True)
class Escaping:
    """One kind of escapes."""

    mark: bytes
    """The first byte of every escape."""
    unit: re.Pattern[bytes]
    """Matches one escape."""
    begun: re.Pattern[bytes]
    """Matches an incomplete escape at the end of the data."""
    decode_one: Callable[[bytes], bytes]
    decode: Callable[[bytes], bytes]


PERCENT = Escaping(b"%", _PERCENT, _PERCENT_BEGUN, _PERCENTS.__getitem__, _decode_percents)
BACKSLASH = Escaping(b"\\", _BACKSLASH, _BACKSLASH_BEGUN, _backslash, _decode_backslashes)


class View:
    """A text with its escapes decoded. An incomplete escape at its end is left out."""

    def __init__(self, escaping: Escaping, data: bytes, *, complete: bool = False):
        self._escaping = escaping
        self.size = len(data)
        self.stop = len(data) if complete else _complete(escaping, data)
        self._data = data[: self.stop]
        self.text = escaping.decode(self._data)

    @cached_property
    def _units(self) -> tuple[list[int], list[tuple[int, int, int]]]:
        """For each escape: the start of its decoded bytes; and their end, and the start and end of the escape."""
        starts, places, gained = [], [], 0
        for found in self._escaping.unit.finditer(self._data):
            size = len(self._escaping.decode_one(found[0]))
            start = found.start() - gained
            starts.append(start)
            places.append((start + size, found.start(), found.end()))
            gained += found.end() - found.start() - size
        return starts, places

    def start(self, at: int) -> int:
        """Return the position in the escaped text of the byte at `at`."""
        return self._place(at, inside=0)

    def end(self, at: int) -> int:
        """Return the position in the escaped text after the byte before `at`."""
        return self._place(at, inside=1)

    def _place(self, at: int, inside: int) -> int:
        near = (len(self.text) - at + 4) * LONGEST
        if near <= _NEAR and 2 * near < len(self._data):  # close to the end, as usual: decode only that part
            cut = boundary(self._data, len(self._data) - near)
            tail = View(self._escaping, self._data[cut:], complete=True)
            return cut + tail._place(at - len(self.text) + len(tail.text), inside)
        starts, places = self._units
        before = bisect_right(starts, at - inside) - 1
        if before < 0:
            return at
        stop, begin, end = places[before]
        if at - inside < stop:
            return (begin, end)[inside]
        return end + at - stop


def _complete(escaping: Escaping, data: bytes) -> int:
    """The length of the data without an incomplete escape at its end."""
    last = data.rfind(escaping.mark, max(0, len(data) - LONGEST + 1))
    if last < 0 or escaping.begun.match(data, last) is None:
        return len(data)
    # In a run of backslashes every second one is escaped by the one before it.
    return last if escaping is PERCENT or boundary(data, last) == last else len(data)


def boundary(data: bytes, at: int) -> int:
    """Return a position at or just before `at` that is not inside a backslash escape."""
    if at == 0 or data[at - 1] != 0x5C:
        return at
    before = data[:at]
    return at - (at - len(before.rstrip(b"\\"))) % 2
