"""Patterns with `*`. The time of a match is bounded, so that an agent cannot slow decisions down with a long name.

Knows nothing of rules or of what the texts mean.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

_ANY: Final = 0
_ONE: Final = 1
_Token = str | int


@dataclass(frozen=True, slots=True)
class Pattern:
    """A text in which `*` matches any characters and, optionally, `?` matches one."""

    text: str
    literal: str | None
    prefix: str
    tokens: tuple[_Token, ...]
    pieces: tuple[str, ...] | None = None
    """The texts between the stars; None if there is a `?`."""

    def matches(self, text: str) -> bool:
        """Whether the pattern matches the whole text."""
        if self.literal is not None:
            return text == self.literal
        if self.pieces is not None:
            return _matches_pieces(self.pieces, text)
        return text.startswith(self.prefix) and _matches(self.tokens, text)


def pattern(text: str, quoted: Sequence[bool] | None = None, *, one: bool = False) -> Pattern:
    """Compile a pattern. `quoted` marks the literal characters; with `one`, `?` matches any one character."""
    tokens: list[_Token] = []
    for index, char in enumerate(text):
        if char == "*" and not (quoted and quoted[index]):
            if not tokens or tokens[-1] != _ANY:
                tokens.append(_ANY)
        elif one and char == "?" and not (quoted and quoted[index]):
            tokens.append(_ONE)
        else:
            tokens.append(char)
    fixed = next((index for index, token in enumerate(tokens) if not isinstance(token, str)), None)
    if fixed is None:
        return Pattern(text, text, text, ())
    prefix = "".join(str(token) for token in tokens[:fixed])
    return Pattern(text, None, prefix, tuple(tokens), None if _ONE in tokens else _between_stars(tokens))


def _between_stars(tokens: Sequence[_Token]) -> tuple[str, ...]:
    pieces: list[list[str]] = [[]]
    for token in tokens:
        if isinstance(token, str):
            pieces[-1].append(token)
        else:
            pieces.append([])
    return tuple("".join(each) for each in pieces)


def _matches_pieces(pieces: tuple[str, ...], text: str) -> bool:
    """Whether a text begins with the first piece, ends with the last, and has the others in between, in order."""
    first, last = pieces[0], pieces[-1]
    at, end = len(first), len(text) - len(last)
    if at > end or not text.startswith(first) or not text.endswith(last):
        return False
    for piece in pieces[1:-1]:
        found = text.find(piece, at, end)
        if found < 0:
            return False
        at = found + len(piece)
    return True


def _matches(tokens: tuple[_Token, ...], text: str) -> bool:
    # On a mismatch, the last `*` takes one more character.
    at, token, star, resume = 0, 0, -1, 0
    while at < len(text):
        if token < len(tokens) and tokens[token] == _ANY:
            star, resume, token = token, at, token + 1
        elif token < len(tokens) and (tokens[token] == _ONE or tokens[token] == text[at]):
            at, token = at + 1, token + 1
        elif star >= 0:
            resume += 1
            at, token = resume, star + 1
        else:
            return False
    return all(each == _ANY for each in tokens[token:])


@dataclass(frozen=True, slots=True)
class PathPattern:
    """An absolute path in which `**` matches any number of names; `*` and `?` do not match a slash."""

    parts: tuple[Pattern | None, ...]
    """None is `**`."""
    fixed: str
    """The deepest folder that contains every path that it matches, or is one of them."""

    def matches(self, path: str) -> bool:
        """Whether it matches an absolute path without `.` and `..`. A trailing `**` matches the folder itself too."""
        names = path.strip("/").split("/") if path.strip("/") else []
        places = {0}
        for part in self.parts:
            if part is None:
                places = set(range(min(places), len(names) + 1))
            else:
                places = {at + 1 for at in places if at < len(names) and part.matches(names[at])}
            if not places:
                return False
        return len(names) in places

    def matches_below(self, path: str) -> bool:
        """Whether it could match something below an absolute path."""
        names = path.strip("/").split("/") if path.strip("/") else []
        places = self._past({0})
        for name in names:
            places = self._past({at if part is None else at + 1 for at, part in self._fitting(places, name)})
        return any(at < len(self.parts) for at in places)

    def moved(self, path: str, to: str) -> list[PathPattern]:
        """Return patterns that match below `to` what this one matches below `path`."""
        names = path.strip("/").split("/")
        places = self._past({0})
        for name in names:
            places = self._past({at if part is None else at + 1 for at, part in self._fitting(places, name)})
        made = tuple(pattern(name) for name in to.strip("/").split("/"))
        rests = {self.parts[at:] for at in places}
        return [PathPattern((*made, *rest), _fixed_of((*made, *rest))) for rest in rests]

    def _fitting(self, places: set[int], name: str) -> list[tuple[int, Pattern | None]]:
        """Return the parts at these positions that match a name."""
        parts = [(at, self.parts[at]) for at in places if at < len(self.parts)]
        return [(at, part) for at, part in parts if part is None or part.matches(name)]

    def _past(self, places: set[int]) -> set[int]:
        """Add the positions after a `**` that matches no name."""
        return places | {at + 1 for at in places if at < len(self.parts) and self.parts[at] is None}


def _fixed_of(parts: Sequence[Pattern | None]) -> str:
    literals = itertools.takewhile(lambda name: name is not None, (part and part.literal for part in parts))
    return "/" + "/".join(str(name) for name in literals)


def path_pattern(text: str) -> PathPattern:
    """Compile a path pattern. A backslash makes the next character literal."""
    parts: list[Pattern | None] = []
    for name, quoted in _names(text):
        if name != "**" or any(quoted):
            parts.append(pattern(name, quoted, one=True))
        elif parts[-1:] != [None]:
            parts.append(None)
    return PathPattern(tuple(parts), _fixed_of(parts))


def _names(text: str) -> Iterator[tuple[str, list[bool]]]:
    name: list[str] = []
    quoted: list[bool] = []
    chars = iter(text + "/")
    for char in chars:
        if char == "/":
            if name:
                yield "".join(name), quoted
            name, quoted = [], []
        else:
            name.append(next(chars, "\\") if char == "\\" else char)
            quoted.append(char == "\\")
