"""Checks our reading of a text with a second parser, tree-sitter: a command that only it sees is a reason to ask.

The two parsers share no code. Tree-sitter accepts texts that ours refuses, so ours decides and tree-sitter objects.
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
"""The text is given in pieces of so many bytes. Reading it once takes two or three reads of each piece. Where the
grammar goes back again and again, which could take seconds, it reads the same pieces many times.
"""
_WIDE = re.compile("[^\0-\xff]")
"""Characters that the scanner of the grammar looks up past the end of a table of libc: some of them end the process."""


def objections(text: str, starts: Collection[int], budget: StepBudget) -> Iterator[str]:
    """Why the text may hold more than was read. `starts` are the places where commands were found."""
    encoded = narrowed(text).encode()
    left = 100 + _READS * len(encoded) // _PIECE

    def read(at: int, _place: Point) -> bytes:
        nonlocal left
        left -= 1
        # An empty answer is the end of the text: the parser stops soon.
        return encoded[at : at + _PIECE] if left > 0 else b""

    budget.spend(len(encoded))
    root = Parser(_LANGUAGE).parse(read).root_node
    if left <= 0:
        raise TooComplex("a second reading of the text takes too many steps")
    if root.has_error:
        yield "the text does not follow the grammar of Bash"
        return
    found = QueryCursor(_NAMES).captures(root)
    # The body of a here-document was read as a text of its own.
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
            yield f"two readings of the text differ at: {text[at : at + 40]}"
            return


def narrowed(text: str) -> str:
    """The text with a character of the same class in the place of every one that the table does not have."""
    return text if text.isascii() else _WIDE.sub(_narrow, text)


def _narrow(found: re.Match[str]) -> str:
    char = found[0]
    return " " if char.isspace() or char == "\ufeff" else "é" if char.isalnum() else "¡"


def _characters(encoded: bytes) -> list[int]:
    """Which character each byte of a text belongs to."""
    return [number - 1 for number in accumulate(1 if byte & 0xC0 != 0x80 else 0 for byte in encoded)]
