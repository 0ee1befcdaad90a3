"""Escapes undone: the bytes a text with percent or backslash escapes stands for, and where each of them came from.

Knows the escapes of URLs, JSON, shells and programming languages, and nothing of what is looked for.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

LONGEST = 6
"""Bytes that may stand for one."""

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


def _percent(unit: bytes) -> bytes:
    return _PERCENTS[unit]


def _undo_percents(data: bytes) -> bytes:
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


# The usual ones are replaced kind by kind, which is much faster than one by one. First every pair of backslashes has to
# be out of the way: from the first of a run on, they pair up as they do when read from the left.
_USUAL = tuple((b"\\" + key, _SHORT[b"\\" + key]) for key in (b'"', b"n", b"/", b"t", b"r", b"'"))
_PAIR, _SET_ASIDE = b"\\\\", b"\\\0"


def _undo_backslashes(data: bytes) -> bytes:
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
    """One kind of escapes: what they begin with, what one is, what the beginning of one is, what they stand for."""

    mark: bytes
    unit: re.Pattern[bytes]
    begun: re.Pattern[bytes]
    meaning: Callable[[bytes], bytes]
    undo: Callable[[bytes], bytes]


PERCENT = Escaping(b"%", _PERCENT, _PERCENT_BEGUN, _percent, _undo_percents)
BACKSLASH = Escaping(b"\\", _BACKSLASH, _BACKSLASH_BEGUN, _backslash, _undo_backslashes)


class View:
    """A text with its escapes undone. What is the beginning of an escape at its end is left off."""

    def __init__(self, escaping: Escaping, data: bytes, *, complete: bool = False):
        self._escaping = escaping
        self.size = len(data)
        self.stop = len(data) if complete else _complete(escaping, data)
        self._data = data[: self.stop]
        self.text = escaping.undo(self._data)

    @cached_property
    def _units(self) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Where each escape's meaning begins; and beside it where that ends, and where the escape begins and ends."""
        starts, places, gained = [], [], 0
        for found in self._escaping.unit.finditer(self._data):
            size = len(self._escaping.meaning(found[0]))
            start = found.start() - gained
            starts.append(start)
            places.append((start + size, found.start(), found.end()))
            gained += found.end() - found.start() - size
        return starts, places

    def start(self, at: int) -> int:
        """Where in the escaped text the byte at `at` begins."""
        return self._place(at, inside=0)

    def end(self, at: int) -> int:
        """Where in the escaped text the bytes before `at` end."""
        return self._place(at, inside=1)

    def _place(self, at: int, inside: int) -> int:
        near = (len(self.text) - at + 4) * LONGEST
        if near <= _NEAR and 2 * near < len(self._data):  # close to the end, as usual: only that part is gone through
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
    """How much of the data there is without an escape that is cut by its end."""
    last = data.rfind(escaping.mark, max(0, len(data) - LONGEST + 1))
    if last < 0 or escaping.begun.match(data, last) is None:
        return len(data)
    # In a run of backslashes every second one is what the one before stands for.
    return last if escaping is PERCENT or boundary(data, last) == last else len(data)


def boundary(data: bytes, at: int) -> int:
    """A place at or just before `at` where no escape is in the middle that could be misread from there on."""
    if at == 0 or data[at - 1] != 0x5C:
        return at
    before = data[:at]
    return at - (at - len(before.rstrip(b"\\"))) % 2
