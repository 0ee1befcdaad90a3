"""Checks the result of our parser with a second one, tree-sitter: a command that only tree-sitter finds is a reason to
ask.

The two parsers share no code. Tree-sitter accepts texts that ours refuses, so ours decides and tree-sitter can only
object.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from itertools import accumulate

import tree_sitter_bash
from tree_sitter import Language, Parser, Point, Query, QueryCursor

from carrel.policy.shell.step_budget import StepBudget, TooComplex

_LANGUAGE = Language(tree_sitter_bash.language())
_NAMES = Query(_LANGUAGE, "(command_name) @name (heredoc_body) @here")
_PIECE, _READS = 32, 12
"""Tree-sitter gets the text in pieces of 32 bytes and normally reads each of them two or three times. A text on which
its grammar backtracks again and again, which could take seconds, makes it read the same pieces many more times.
"""
_WIDE = re.compile("[^\0-\xff]")
"""Characters that make the scanner of the grammar read beyond the end of a table of libc, which can crash the process.
"""


def objections(text: str, starts: Collection[int], budget: StepBudget) -> Iterator[str]:
    """Yield reasons why the text may contain more commands. `starts` are the positions of those that were found."""
    encoded = narrowed(text).encode()
    left = 100 + _READS * len(encoded) // _PIECE

    def read(at: int, _place: Point) -> bytes:
        nonlocal left
        left -= 1
        # The parser takes an empty result for the end of the text and stops soon.
        return encoded[at : at + _PIECE] if left > 0 else b""

    budget.spend(len(encoded))
    root = Parser(_LANGUAGE).parse(read).root_node
    if left <= 0:
        raise TooComplex("the second parser takes too many steps")
    if root.has_error:
        yield "the text does not follow the grammar of Bash"
        return
    found = QueryCursor(_NAMES).captures(root)
    # Our parser reads the body of a here-document as a separate text.
    bodies = sorted((node.start_byte, node.end_byte) for node in found.get("here", ()))
    characters = None if len(encoded) == len(text) else _characters(encoded)
    body = 0
    for byte in sorted(node.start_byte for node in found.get("name", ())):
        while body < len(bodies) and bodies[body][1] <= byte:
            body += 1
        if body < len(bodies) and bodies[body][0] <= byte:
            continue
        at = byte if characters is None else characters[byte]
        if at not in starts:
            yield f"two parsers read the text differently at: {text[at : at + 40]}"
            return


def narrowed(text: str) -> str:
    """Replace every character that the table lacks by one of the same class."""
    return text if text.isascii() else _WIDE.sub(_narrow, text)


def _narrow(found: re.Match[str]) -> str:
    char = found[0]
    return " " if char.isspace() or char == "\ufeff" else "é" if char.isalnum() else "¡"


def _characters(encoded: bytes) -> list[int]:
    """The index of the character that each byte belongs to."""
    return [number - 1 for number in accumulate(1 if byte & 0xC0 != 0x80 else 0 for byte in encoded)]
