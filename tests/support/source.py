"""What tests want to know of source files, each parsed once for all of them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Imported(NamedTuple):
    """An import, with whether it is inside a function and whether it is for type checkers only."""

    node: ast.Import | ast.ImportFrom
    inside: bool
    for_types: bool


class Source(NamedTuple):
    """A source file. The whole tree is not kept: trees of all files are millions of objects."""

    docstring: str | None
    classes: list[str]
    imports: list[Imported]


@functools.cache
def source(path: Path) -> Source:
    tree = ast.parse(path.read_text())
    found = list(_statements(tree, inside=False, for_types=False))
    return Source(
        ast.get_docstring(tree),
        [node.name for node, *_ in found if isinstance(node, ast.ClassDef)],
        [Imported(node, *where) for node, *where in found if isinstance(node, ast.Import | ast.ImportFrom)],
    )


def _statements(node: ast.AST, *, inside: bool, for_types: bool) -> Iterator[tuple[ast.AST, bool, bool]]:
    yield node, inside, for_types
    inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    checked = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else ():
            if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
                yield from _statements(child, inside=inside, for_types=for_types or (checked and name == "body"))
