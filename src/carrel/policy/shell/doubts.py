"""Which functions of a text are not certain to be defined when its next line runs.

An error in an expansion makes Bash drop the rest of the line, definitions included, and go on with the next.
"""

from __future__ import annotations

from collections.abc import Collection

from carrel.policy.shell.builtins import SHELL_WORDS
from carrel.policy.shell.syntax import Block, Function, Node, Simple, Text


class Doubts:
    """Follows the nodes of a text, one after the other."""

    def __init__(self, block: Block):
        self._block = block
        self._line = -1
        self._risky = False
        self._names: set[str] = set()

    def before(self, number: int, functions: Collection[str]) -> set[str]:
        """The functions that are not certain when a node begins."""
        if not self._block.lines:
            return set()
        gone: set[str] = set()
        if self._block.lines[number] != self._line:
            gone, self._names = self._names, set()
            self._line, self._risky = self._block.lines[number], False
        node = self._block.nodes[number]
        if isinstance(node, Function):
            if self._risky:
                self._names.add(node.name)
        else:
            self._risky = self._risky or not _is_plain(node, functions)
        return gone


def _is_plain(node: Node, functions: Collection[str]) -> bool:
    """Whether a node is a command without any expansion, so that nothing in it can go wrong before it runs."""
    if not isinstance(node, Simple) or node.assignments or node.arrays or not node.words:
        return False
    every = [*node.words, *(each.target for each in node.redirects)]
    texts = all(isinstance(part, Text) for word in every for part in word.parts)
    name = node.words[0].plain
    return texts and name is not None and name not in functions and name not in SHELL_WORDS
