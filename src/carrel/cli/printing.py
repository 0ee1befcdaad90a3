"""How results look: tables for people, JSON for programs. Text from a sandbox cannot steer the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.text import Text

_GAP = 2
_NARROWEST = 6
_NAMES = {"ID", "CONTEXT"}
_NAME_WIDTH = 24
"""What other commands are given is of no use when it is cut."""


def print_json(value: object) -> None:
    """A value as readable JSON; models in it too."""
    print(json.dumps(value, indent=2, ensure_ascii=True, default=_fields))


def print_done(**what: object) -> None:
    """What was done, as JSON: for commands whose answer has nothing else to tell."""
    print_json(what)


def print_line(value: object) -> None:
    """A value as one line of JSON, at once."""
    print(json.dumps(value, ensure_ascii=True, default=_fields), flush=True)


def _fields(model: BaseModel) -> dict[str, object]:
    return model.model_dump(mode="json")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str | Text]], *, wrap: bool = False) -> None:
    """A table; cut or wrapped to the width of a terminal, whole when it goes elsewhere."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold" if console.is_terminal else "", padding=(0, _GAP, 0, 0))
    # A plain str would be read as markup; a name like "[red]" must show as itself.
    cells = [[Text(plain(cell)) if isinstance(cell, str) else cell for cell in row] for row in rows]
    widths = [max(len(name), *(row[at].cell_len for row in cells), 1) for at, name in enumerate(columns)]
    room = console.width - _GAP * len(columns)
    if console.is_terminal:
        widths = fitting(widths, room, [_NAME_WIDTH if name in _NAMES else _NARROWEST for name in columns])
    # Wider than a narrow terminal it runs over: that can be read, cells of two letters cannot.
    console.width = max(sum(widths) + _GAP * len(columns), console.width)
    for column, width in zip(columns, widths, strict=True):
        table.add_column(column, overflow="fold" if wrap else "ellipsis", no_wrap=not wrap, max_width=width)
    for row in cells:
        table.add_row(*row)
    console.print(table)


def fitting(widths: Sequence[int], room: int, least: Sequence[int]) -> list[int]:
    """The widths of columns that have so much room together: only the widest give way, none below its least, so that
    the short ones, which say most, stay whole.
    """
    most = max(widths, default=0)
    fitted = [*widths]
    while most > min(least, default=0) and sum(fitted) > room:
        most -= 1
        fitted = [min(width, max(most, fewest)) for width, fewest in zip(widths, least, strict=True)]
    return fitted


def coloured(text: str, style: str) -> Text:
    """A cell in a colour."""
    from rich.text import Text

    return Text(plain(text), style=style)


def plain(text: str) -> str:
    """Text with its control characters made visible."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text)


def age(moment: datetime, now: datetime | None = None) -> str:
    """How long ago, in one unit."""
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    seconds = max(0, int(((now or datetime.now(UTC)) - moment).total_seconds()))
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def size(count: int) -> str:
    """Bytes for people."""
    value = float(count)
    for unit in ("B", "K", "M", "G"):
        if value < 1024:
            return f"{value:.0f}{unit}" if unit == "B" or value >= 10 else f"{value:.1f}{unit}"
        value /= 1024
    return f"{value:.1f}T"
