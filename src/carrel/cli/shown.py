"""How results look: tables for people, JSON for programs. Text from a sandbox cannot steer the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text


def print_json(value: object) -> None:
    """A value as readable JSON."""
    print(json.dumps(value, indent=2, ensure_ascii=True))


def print_line(value: object) -> None:
    """A value as one line of JSON, at once."""
    print(json.dumps(value, ensure_ascii=True), flush=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str | Text]], *, wrap: bool = False) -> None:
    """A table; cut to the width of a terminal, whole when it goes elsewhere."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold" if console.is_terminal else "", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold" if wrap else "ellipsis", no_wrap=not wrap)
    for row in rows:
        # A plain str would be read as markup; a name like "[red]" must show as itself.
        table.add_row(*(Text(plain(cell)) if isinstance(cell, str) else cell for cell in row))
    if not console.is_terminal:
        console.width = max(console.measure(table).maximum, 20)
    console.print(table)


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
