"""`nodes`: lists the servers on the server's database; revokes the SPIFFE ID of one, and readmits it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from carrel.cli import options
from carrel.cli.connecting import connected
from carrel.cli.printing import age, coloured, print_items

if TYPE_CHECKING:
    from rich.text import Text

    from carrel.models import NodeInfo

_COLOURS = {"running": "green", "unreachable": "yellow", "gone": "red", "revoked": "red"}
Name = Annotated[str, typer.Argument(metavar="NAME", help="The server, as `carrel nodes` shows it.")]


app = typer.Typer(
    help="The servers on the database, with their addresses and sandboxes. `*` marks the one that answers.",
    invoke_without_command=True,
    add_completion=False,
)
_COLUMNS = ["NAME", "STATE", "SANDBOXES", "URL", "SPIFFE ID", "VERSION", "UP", "SEEN", "NOTICE"]


@app.callback()
def nodes(context: typer.Context, json: options.Json = False) -> None:
    """List the servers on the database, with their addresses and sandboxes. `*` marks the one that answers.

    \b
    carrel nodes
    """
    if context.invoked_subcommand is None:
        with connected() as client:
            found = client.nodes()
        print_items(found, json, _COLUMNS, _row)


@app.command("revoke")
def revoke(name: Name, json: options.Json = False) -> None:
    """Revoke the SPIFFE ID of a server: the others refuse it within seconds, and take its sessions over.

    It still knows the key of the secrets and the password of the database. Change both if it is in wrong hands. For
    administrators.

    \b
    carrel nodes revoke server-2
    """
    with connected() as client:
        found = client.revoke_node(name)
    print_items(found, json, _COLUMNS, _row)


@app.command("readmit")
def readmit(name: Name, json: options.Json = False) -> None:
    """Undo the revocation of a server, so that it may be started again. For administrators.

    \b
    carrel nodes readmit server-2
    """
    with connected() as client:
        found = client.readmit_node(name)
    print_items(found, json, _COLUMNS, _row)


def _row(info: NodeInfo) -> list[str | Text]:
    return [
        f"{info.name}{'*' if info.here else ''}",
        coloured(info.state, _COLOURS[info.state]),
        f"{info.sandboxes} of {info.capacity}",
        info.url or "-",
        info.spiffe_id or "-",
        info.version or "-",
        age(info.started_at),
        age(info.seen_at),
        info.notice or "-",
    ]
