"""`nodes`: lists the servers on the server's database."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carrel.cli import options
from carrel.cli.connecting import connected
from carrel.cli.printing import age, coloured, print_items

if TYPE_CHECKING:
    from rich.text import Text

    from carrel.models import NodeInfo

_COLOURS = {"running": "green", "unreachable": "yellow", "gone": "red"}


def nodes(json: options.Json = False) -> None:
    """List the servers on the database, with their addresses and sandboxes. `*` marks the one that answers.

    \b
    carrel nodes
    """
    with connected() as client:
        found = client.nodes()
    print_items(found, json, ["NAME", "STATE", "SANDBOXES", "URL", "VERSION", "UP", "SEEN", "NOTICE"], _row)


def _row(info: NodeInfo) -> list[str | Text]:
    return [
        f"{info.name}{'*' if info.here else ''}",
        coloured(info.state, _COLOURS[info.state]),
        f"{info.sandboxes} of {info.capacity}",
        info.url or "-",
        info.version or "-",
        age(info.started_at),
        age(info.seen_at),
        info.notice or "-",
    ]
