"""The lines that differ between two texts, as a unified diff. Pure.

The texts may be made by hostile code, and the usual search for the shortest diff takes time that grows with the product
of both lengths. So lines that occur once in both texts are matched first; only short stretches between them are
searched.
"""

from __future__ import annotations

import difflib
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Literal

_SEARCHED = 2500
"""The largest product of the lengths of two stretches that are searched for equal lines."""

_Code = tuple[Literal["replace", "delete", "insert", "equal"], int, int, int, int]


class _Matched(difflib.SequenceMatcher[str]):
    """Groups differences that were found already."""

    def __init__(self, codes: list[_Code]):
        super().__init__(None, "", "")
        self._codes = codes

    def get_opcodes(self) -> list[_Code]:
        """Return the differences."""
        return self._codes


def unified(old: str, new: str, old_name: str, new_name: str) -> str:
    """Return the unified diff of two texts; empty when they are equal."""
    a, b = old.splitlines(keepends=True), new.splitlines(keepends=True)
    lines: list[str] = []
    for group in _Matched(_opcodes(a, b)).get_grouped_opcodes(3):
        if not any(code[0] != "equal" for code in group):
            continue
        first, last = group[0], group[-1]
        lines.append(f"@@ -{_range(first[1], last[2])} +{_range(first[3], last[4])} @@\n")
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                lines += [" " + line for line in a[i1:i2]]
                continue
            lines += ["-" + line for line in a[i1:i2]]
            lines += ["+" + line for line in b[j1:j2]]
    if not lines:
        return ""
    shown = [line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines]
    return "".join([f"--- {old_name}\n", f"+++ {new_name}\n", *shown])


def _range(start: int, stop: int) -> str:
    length = stop - start
    if length == 1:
        return str(start + 1)
    return f"{start + 1 if length else start},{length}"


def _opcodes(a: Sequence[str], b: Sequence[str]) -> list[_Code]:
    codes: list[_Code] = []
    i = j = 0
    for x, y in [*_anchors(a, b), (len(a), len(b))]:
        codes += _stretch(a, b, i, x, j, y)
        if x < len(a):
            codes.append(("equal", x, x + 1, y, y + 1))
        i, j = x + 1, y + 1
    merged: list[_Code] = []
    for code in codes:
        if merged and merged[-1][0] == code[0]:
            last = merged[-1]
            merged[-1] = (code[0], last[1], code[2], last[3], code[4])
        else:
            merged.append(code)
    return merged


def _anchors(a: Sequence[str], b: Sequence[str]) -> list[tuple[int, int]]:
    """Return the longest rising list of positions of lines that occur once in both texts, with equal beginnings and
    ends.
    """
    start = 0
    while start < min(len(a), len(b)) and a[start] == b[start]:
        start += 1
    end = 0
    while end < min(len(a), len(b)) - start and a[-1 - end] == b[-1 - end]:
        end += 1
    ones, others = Counter(a[start : len(a) - end]), Counter(b[start : len(b) - end])
    where = {line: at for at, line in enumerate(b) if start <= at < len(b) - end and others[line] == 1}
    pairs = [(at, where[a[at]]) for at in range(start, len(a) - end) if ones[a[at]] == 1 and a[at] in where]
    tails: list[int] = []
    ends: list[int] = []
    before: list[int] = []
    for index, (_, y) in enumerate(pairs):
        at = bisect_left(tails, y)
        before.append(ends[at - 1] if at else -1)
        if at == len(tails):
            tails.append(y)
            ends.append(index)
        else:
            tails[at], ends[at] = y, index
    chain: list[tuple[int, int]] = []
    index = ends[-1] if ends else -1
    while index >= 0:
        chain.append(pairs[index])
        index = before[index]
    head = [(at, at) for at in range(start)]
    tail = [(len(a) - at, len(b) - at) for at in range(end, 0, -1)]
    return [*head, *reversed(chain), *tail]


def _stretch(a: Sequence[str], b: Sequence[str], i1: int, i2: int, j1: int, j2: int) -> list[_Code]:
    if i1 == i2 and j1 == j2:
        return []
    if i1 == i2:
        return [("insert", i1, i2, j1, j2)]
    if j1 == j2:
        return [("delete", i1, i2, j1, j2)]
    if (i2 - i1) * (j2 - j1) > _SEARCHED:
        return [("replace", i1, i2, j1, j2)]
    found = difflib.SequenceMatcher(None, a[i1:i2], b[j1:j2], autojunk=False).get_opcodes()
    return [(tag, i1 + p, i1 + q, j1 + r, j1 + s) for tag, p, q, r, s in found]
