"""Reads the small programs that sed and awk get as an argument: what they run and which files they write.

Anything that is not certain is a reason to ask.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from carrel.policy.shell.arguments import Argument


@dataclass(slots=True)
class Effects:
    """The effects of the options or the script of a program: shell texts and programs that it runs, files that it
    writes, and reasons to ask.
    """

    texts: list[str] = field(default_factory=list)
    programs: list[str] = field(default_factory=list)
    writes: list[Argument] = field(default_factory=list)
    asks: list[str] = field(default_factory=list)


_ADDRESS = re.compile(r"[0-9]+(?:~[0-9]+)?|\$|\+[0-9]+|~[0-9]+")
_SPACE = re.compile(r"[\s;]*")
_SPACE_ONLY = re.compile(r"[ \t]*")
_TO_LINE_END = re.compile(r"[^\n]*")
_LABEL = re.compile(r"[^\n;}]*")
_NUMBER = re.compile(r"[ \t]*[0-9]*")
_FLAGS = re.compile(r"[gpiImM0-9]*")
_REGEX_FLAGS = re.compile(r"[IM]*")
_OUTPUT = frozenset({"/dev/stdout", "/dev/stderr"})


class _Unsupported(Exception):
    """The script uses something that is not known here."""


def read_sed(script: str, found: Effects) -> None:
    """Add what a script of sed runs and writes to `found`."""
    try:
        at = 0
        while (at := _match(_SPACE, script, at)) < len(script):
            at = _command(script, at, found)
    except _Unsupported:
        found.asks.append(f"a script of sed that this reader does not support: {script[:80]}")


def _match(shape: re.Pattern[str], script: str, at: int) -> int:
    found = shape.match(script, at)
    return at if found is None else found.end()


def _command(script: str, at: int, found: Effects) -> int:
    at = _addresses(script, at)
    letter, at = script[at : at + 1], at + 1
    if letter in {"{", "}"}:
        return at
    if letter == "#":
        return _match(_TO_LINE_END, script, at)
    if letter and letter in "=dDgGhHnNpPxzF":
        return at
    if letter and letter in "qQlL":
        return _match(_NUMBER, script, at)
    if letter and letter in ":btT":
        return _match(_LABEL, script, at)
    if letter and letter in "aicrR":
        return _text(script, at)
    if letter and letter in "wW":
        return _file(script, at, found)
    if letter == "e":
        end = _match(_TO_LINE_END, script, at)
        if command := script[at:end].strip():
            found.texts.append(command)
        else:
            found.asks.append("a script of sed that runs the text that it reads")
        return end
    if letter and letter in "sy":
        delimiter, at = script[at : at + 1], at + 1
        if not delimiter or delimiter in "\\\n":
            raise _Unsupported
        at = _delimited(script, _delimited(script, at, delimiter), delimiter)
        return at if letter == "y" else _substitution_flags(script, at, found)
    raise _Unsupported


def _addresses(script: str, at: int) -> int:
    at = _address(script, at)
    comma = _match(_SPACE_ONLY, script, at)
    if script[comma : comma + 1] == ",":
        at = _address(script, _match(_SPACE_ONLY, script, comma + 1))
    at = _match(_SPACE_ONLY, script, at)
    while script[at : at + 1] == "!":
        at = _match(_SPACE_ONLY, script, at + 1)
    return at


def _address(script: str, at: int) -> int:
    if script[at : at + 1] == "/":
        return _match(_REGEX_FLAGS, script, _delimited(script, at + 1, "/"))
    if script[at : at + 1] == "\\":
        delimiter = script[at + 1 : at + 2]
        if not delimiter or delimiter in "\\\n":
            raise _Unsupported
        return _match(_REGEX_FLAGS, script, _delimited(script, at + 2, delimiter))
    return _match(_ADDRESS, script, at)


def _delimited(script: str, at: int, delimiter: str) -> int:
    """The position after the next delimiter without a backslash before it."""
    while at < len(script):
        if script[at] == "\\":
            at += 2
        elif script[at] == delimiter:
            return at + 1
        else:
            at += 1
    raise _Unsupported


def _text(script: str, at: int) -> int:
    """The position after the text of `a`, `i` or `c`: its line and the lines that a backslash joins to it."""
    while True:
        end = _match(_TO_LINE_END, script, at)
        if not script[at:end].endswith("\\") or end == len(script):
            return end
        at = end + 1


def _file(script: str, at: int, found: Effects) -> int:
    end = _match(_TO_LINE_END, script, at)
    if (name := script[at:end].strip()) not in _OUTPUT:
        found.writes.append(name)
    return end


def _substitution_flags(script: str, at: int, found: Effects) -> int:
    at = _match(_FLAGS, script, at)
    letter = script[at : at + 1]
    if letter == "w":
        return _file(script, at + 1, found)
    if letter == "e":
        found.asks.append("a script of sed that runs the text that it makes")
        return _substitution_flags(script, at + 1, found)
    if letter and letter not in "; \t\n}#":
        raise _Unsupported
    return at


# --- awk

_STRING = re.compile(r'"(?:\\.|[^"\\\n])*"', re.DOTALL)
_REGEX = re.compile(r"/(?:\\.|[^/\\\n])*/")
_BEFORE_REGEX = frozenset("~!,({;&|}\n")
"""Characters that may come before a regular expression, but never before a division."""
_PRINTS = re.compile(r"\bprintf?\b")


def awk_reasons(program: str) -> Iterator[str]:
    """Yield reasons why a program of awk may run or write something, apart from its strings and regular expressions."""
    try:
        bare = _without_quoted(program)
    except _Unsupported:
        yield "uses a construct that this reader does not support"
        return
    if re.search(r"\bsystem\b", bare) or "@" in bare:
        yield "runs commands"
    if re.search(r"(?<!\|)\|(?!\|)", bare):
        yield "reads from or writes to a command"
    for statement in re.split(r"[;}\n]", bare):
        # Not one regular expression for both: it would search the whole statement again from each `print`.
        if (prints := _PRINTS.search(statement)) and ">" in statement[prints.end() :]:
            yield "writes a file"
            return


def _without_quoted(program: str) -> str:
    """Remove the comments, strings and regular expressions of a program of awk."""
    made: list[str] = []
    at, before = 0, "\n"
    while at < len(program):
        char, shape = program[at], None
        if program.startswith("\\\n", at):
            at += 2
            continue
        if char == "#":
            at = _match(_TO_LINE_END, program, at)
            continue
        if char == '"':
            shape = _STRING
        elif char == "/" and before in _BEFORE_REGEX:
            shape = _REGEX
        if shape is None:
            made.append(char)
            before = before if char in " \t" else char
            at += 1
            continue
        found = shape.match(program, at)
        # Versions of awk differ on whether a slash in brackets ends a regular expression.
        if found is None or (shape is _REGEX and found[0].rfind("[") > found[0].rfind("]")):
            raise _Unsupported
        made.append('""')
        before = '"'
        at = found.end()
    return "".join(made)
