"""A second reading of shell text, with the grammar of tree-sitter: a command that only it sees is a reason to ask.

The two readings share no code. Theirs is lenient where ours refuses, so ours decides and theirs objects.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

_LANGUAGE = Language(tree_sitter_bash.language())


def objections(text: str, starts: Collection[int]) -> Iterator[str]:
    """Why the text may hold more than was read. `starts` are the places where commands were found."""
    encoded = text.encode()
    tree = Parser(_LANGUAGE).parse(encoded)
    if tree.root_node.has_error:
        yield "the text does not follow the grammar of Bash"
        return
    ascii_only = len(encoded) == len(text)
    for name in _names(tree.root_node):
        at = name.start_byte if ascii_only else len(encoded[: name.start_byte].decode(errors="replace"))
        if at not in starts:
            yield f"two readings of the text differ at: {text[at : at + 40]}"
            return


def _names(root: Node) -> Iterator[Node]:
    pending = [root]
    while pending:
        node = pending.pop()
        # The body of a here-document was read as a text of its own.
        if node.type == "heredoc_body":
            continue
        if node.type == "command_name":
            yield node
        pending += node.children
