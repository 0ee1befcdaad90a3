"""Expands the words of a command to arguments, as far as they are known before the command runs.

Brace expansion works as in Bash. File name patterns, variables and substitutions give an `Unknown`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from carrel.policy.shell.step_budget import StepBudget
from carrel.policy.shell.syntax import Expansion, LiteralText, Unreadable, Word

MOST_WORDS = 1000
SPARE_LOOKS, LOOKS = 50_000, 4
"""The most characters to search for the braces of a word: a fixed number, and more for each character of the word.
Every opening brace may search the whole rest of the word.
"""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Arguments that are known only at run time.

    `one` is exactly one argument and `each` is one or more; all of them begin with `prefix` and end with `suffix`.
    `any` is any number of any arguments.
    """

    source: str
    count: Literal["one", "each", "any"]
    prefix: str = ""
    suffix: str = ""

    def may_be(self, text: str) -> bool:
        """Whether one of the arguments may be this text."""
        long_enough = len(text) >= len(self.prefix) + len(self.suffix)
        return self.count == "any" or (long_enough and text.startswith(self.prefix) and text.endswith(self.suffix))


Argument = str | Unknown

_Cell = tuple[str, bool] | Expansion
"""One character and whether it is quoted, or an expansion."""

_SEQUENCE = re.compile(r"(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])(?:\.\.(-?\d+))?")
_EMPTY: _Cell = ("", True)


def arguments(word: Word, budget: StepBudget) -> list[Argument]:
    """Expand a word of a command."""
    budget.spend(1 + len(word.source) // 8)
    if (plain := word.plain) is not None and not any(mark in plain for mark in "{*?[~"):
        return [plain]
    # Bash drops a word that brace expansion leaves empty, unless it has quotes.
    return [_argument(cells, word.source) for cells in expand_braces(_cells(word), budget) if cells]


def value(word: Word) -> Argument:
    """Expand a word that Bash does not split: the value of an assignment, the target of a redirection."""
    return _argument(_cells(word), word.source)


def shown(argument: Argument) -> str:
    """An argument as a person would write it."""
    if isinstance(argument, Unknown):
        return argument.source
    return argument if argument and not re.search(r"[^\w@%+=:,./{}*?\[\]-]", argument) else shlex.quote(argument)


def word_set(text: str) -> frozenset[str]:
    """The words of a text, for tables."""
    return frozenset(text.split())


def joined(argv: Iterable[Argument]) -> str:
    """A command line as a person would write it."""
    return " ".join(shown(argument) for argument in argv)


def _cells(word: Word) -> list[_Cell]:
    cells: list[_Cell] = []
    for part in word.parts:
        if isinstance(part, Expansion):
            cells.append(part)
        elif part.text:
            cells += [(char, part.quoted) for char in part.text]
        else:
            cells.append(_EMPTY)
    return cells


def _argument(cells: list[_Cell], source: str) -> Argument:
    if not any(isinstance(cell, Expansion) for cell in cells):
        text = "".join(cell[0] for cell in cells if isinstance(cell, tuple))
        bare = "".join(cell[0] if not cell[1] else "\0" for cell in cells if isinstance(cell, tuple))
        if bare.startswith("~"):
            return Unknown(source, "one")
        if (begin := _pattern(bare)) is not None:
            skipped = sum(1 for cell in cells if cell == _EMPTY)
            if skipped:
                return Unknown(source, "each")
            end = max(bare.rfind(mark) for mark in "*?]")
            return Unknown(source, "each", text[:begin], text[end + 1 :])
        return text
    splits = any(isinstance(cell, Expansion) and cell.many for cell in cells)
    bare = "".join(cell[0] for cell in cells if isinstance(cell, tuple) and not cell[1])
    if splits or _pattern(bare) is not None:
        return Unknown(source, "any")
    first = next(index for index, cell in enumerate(cells) if isinstance(cell, Expansion))
    last = next(index for index in range(len(cells) - 1, -1, -1) if isinstance(cells[index], Expansion))
    prefix = "".join(cell[0] for cell in cells[:first] if isinstance(cell, tuple))
    suffix = "".join(cell[0] for cell in cells[last + 1 :] if isinstance(cell, tuple))
    if bare.startswith("~"):
        prefix = ""
    return Unknown(source, "one", prefix, suffix)


def _pattern(text: str) -> int | None:
    """The position of the first character of a file name pattern. A bracket counts only if another one closes it."""
    brackets = text.find("[", 0, max(0, text.rfind("]")))
    return min((at for at in (text.find("*"), text.find("?"), brackets) if at >= 0), default=None)


# --- braces


@dataclass(slots=True)
class _Bounds:
    """How many characters may still be searched in one word, and how many words made of it."""

    budget: StepBudget
    looks: int
    words: int = MOST_WORDS

    def make(self, words: int) -> None:
        self.words -= words
        if self.words < 0:
            raise Unreadable("braces that expand to too many words")

    def look(self, characters: int) -> None:
        self.budget.spend(1 + characters // 4)
        self.looks -= characters
        if self.looks < 0:
            raise Unreadable("a long word with too many braces")


def expand_braces(cells: list[_Cell], budget: StepBudget) -> list[list[_Cell]]:
    """Return every word that brace expansion makes of one word."""
    return _expand(cells, _Bounds(budget, SPARE_LOOKS + LOOKS * len(cells)))


def _expand(cells: list[_Cell], bounds: _Bounds) -> list[list[_Cell]]:
    bounds.look(len(cells))
    opening = _opening(cells, bounds)
    if opening is None:
        return [cells]
    start, end = opening
    before, inside, behind = cells[:start], cells[start + 1 : end], cells[end + 1 :]
    if any(cell == (",", False) for cell in inside):
        middle = [each for piece in _pieces(inside) for each in _expand(piece, bounds)]
    elif (sequence := _sequence(inside)) is not None:
        middle = sequence
    else:
        middle = [cells[start : end + 1]]
    rest = _expand(behind, bounds) if behind else [[]]
    bounds.make(len(middle) * len(rest))
    bounds.budget.spend(
        (len(middle) * len(rest) * len(before) + len(rest) * sum(map(len, middle)) + len(middle) * sum(map(len, rest)))
        // 4
    )
    return [[*before, *each, *tail] for each in middle for tail in rest]


def _opening(cells: list[_Cell], bounds: _Bounds) -> tuple[int, int] | None:
    """The positions of the first pair of braces that expands."""
    for start, cell in enumerate(cells):
        if cell != ("{", False):
            continue
        if start == 0 and (len(cells) == 1 or cells[1] == ("}", False)):
            continue
        end = _closing(cells, start + 1)
        bounds.look((len(cells) if end is None else end) - start)
        if end is not None:
            return start, end
    return None


def _closing(cells: list[_Cell], start: int) -> int | None:
    level, separators = 0, 0
    for index in range(start, len(cells)):
        cell = cells[index]
        if cell == ("}", False) and level == 0 and separators:
            return index
        if cell == ("{", False):
            level += 1
        elif cell == ("}", False) and level:
            level -= 1
        elif level == 0 and (
            cell == (",", False)
            or (cells[index : index + 2] == [(".", False)] * 2 and cells[index + 2 : index + 3] != [("}", False)])
        ):
            separators += 1
    return None


def _pieces(cells: list[_Cell]) -> list[list[_Cell]]:
    pieces: list[list[_Cell]] = [[]]
    level = 0
    for cell in cells:
        if cell == (",", False) and level == 0:
            pieces.append([])
            continue
        if cell == ("{", False):
            level += 1
        elif cell == ("}", False) and level:
            level -= 1
        pieces[-1].append(cell)
    return pieces


def _sequence(cells: list[_Cell]) -> list[list[_Cell]] | None:
    if any(isinstance(cell, Expansion) or cell[1] for cell in cells):
        return None
    text = "".join(cell[0] for cell in cells if isinstance(cell, tuple))
    found = _SEQUENCE.fullmatch(text)
    if not found:
        return None
    first, last, by = found[1], found[2], int(found[3] or 1)
    if first.isalpha() != last.isalpha():
        return None
    if any(len(part) > 9 for part in (first, last, found[3] or "")):
        raise Unreadable("a sequence in braces with very long numbers")
    letters = first.isalpha()
    if letters and first.islower() != last.islower():
        raise Unreadable("a sequence in braces from a lower-case to an upper-case letter, or the other way round")
    low, high = (ord(first), ord(last)) if letters else (int(first), int(last))
    step = abs(by) or 1
    if abs(high - low) // step > MOST_WORDS:
        raise Unreadable("braces that expand to too many words")
    width = 0
    if not letters and any(re.match(r"-?0\d", part) for part in (first, last)):
        width = max(len(first), len(last))
    numbers = range(low, high + 1, step) if low <= high else range(low, high - 1, -step)
    texts = [chr(number) if letters else f"{number:0{width}d}" if width else str(number) for number in numbers]
    return [[(char, False) for char in each] for each in texts]


def literal(parts: tuple[LiteralText | Expansion, ...]) -> str | None:
    """The text of these parts; None if one of them is an expansion."""
    if any(isinstance(part, Expansion) for part in parts):
        return None
    return "".join(part.text for part in parts if isinstance(part, LiteralText))
