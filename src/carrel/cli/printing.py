"""Prints results: tables for people, JSON for programs. Control characters from a sandbox are escaped."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.text import Text

T = TypeVar("T")
_GAP = 2
_NARROWEST = 6
_NAMES = {"ID", "CONTEXT"}
_NAME_WIDTH = 24
"""Ids are arguments of other commands, so they must not be cut."""


def print_json(value: object) -> None:
    """Print a value, which may contain models, as indented JSON."""
    print(json.dumps(value, indent=2, ensure_ascii=True, default=_fields))


def print_done(**what: object) -> None:
    """Print what was done as JSON, for commands whose answer has no content."""
    print_json(what)


def print_line(value: object) -> None:
    """Print a value as one line of JSON and flush."""
    print(json.dumps(value, ensure_ascii=True, default=_fields), flush=True)


def _fields(model: BaseModel) -> dict[str, object]:
    return model.model_dump(mode="json")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str | Text]], *, wrap: bool = False) -> None:
    """Print a table, cut or wrapped to the width of the terminal. It is not cut when the output is not a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold" if console.is_terminal else "", padding=(0, _GAP, 0, 0))
    # rich reads a str as markup, so a name like "[red]" must be a Text.
    cells = [[Text(plain(cell)) if isinstance(cell, str) else cell for cell in row] for row in rows]
    widths = [max(len(name), *(row[at].cell_len for row in cells), 1) for at, name in enumerate(columns)]
    room = console.width - _GAP * len(columns)
    if console.is_terminal:
        widths = fitting(widths, room, [_NAME_WIDTH if name in _NAMES else _NARROWEST for name in columns])
    # On a very narrow terminal the table runs over: that is better than cells of two letters.
    console.width = max(sum(widths) + _GAP * len(columns), console.width)
    for column, width in zip(columns, widths, strict=True):
        table.add_column(column, overflow="fold" if wrap else "ellipsis", no_wrap=not wrap, max_width=width)
    for row in cells:
        table.add_row(*row)
    console.print(table)


def print_items(
    items: Sequence[T], json: bool, columns: Sequence[str], row: Callable[[T], Sequence[str | Text]]
) -> None:
    """Print a list as JSON, or as a table with one row per item; no table when it is empty."""
    if json:
        print_json(items)
    elif items:
        print_table(columns, [row(item) for item in items])


def fitting(widths: Sequence[int], room: int, least: Sequence[int]) -> list[int]:
    """Reduce column widths until they fit into `room`: the widest first, none below its minimum in `least`."""
    most = max(widths, default=0)
    fitted = [*widths]
    while most > min(least, default=0) and sum(fitted) > room:
        most -= 1
        fitted = [min(width, max(most, fewest)) for width, fewest in zip(widths, least, strict=True)]
    return fitted


def coloured(text: str, style: str) -> Text:
    """Make a coloured cell."""
    from rich.text import Text

    return Text(plain(text), style=style)


def plain(text: str) -> str:
    """Escape control characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text)


def age(moment: datetime, now: datetime | None = None) -> str:
    """Format how long ago a moment was, in one unit."""
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    seconds = max(0, int(((now or datetime.now(UTC)) - moment).total_seconds()))
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def size(count: int) -> str:
    """Format a number of bytes."""
    value = float(count)
    for unit in ("B", "K", "M", "G"):
        if value < 1024:
            return f"{value:.0f}{unit}" if unit == "B" or value >= 10 else f"{value:.1f}{unit}"
        value /= 1024
    return f"{value:.1f}T"
