"""`pool`: list the pools of warm sandboxes, and change their sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from carrel.cli import options
from carrel.cli.connecting import connected
from carrel.cli.failures import note
from carrel.cli.printing import print_items

if TYPE_CHECKING:
    from carrel.models.pools import PoolInfo

app = typer.Typer(
    help="Pools: warm sandboxes of slow providers, which wait for their owner.",
    no_args_is_help=True,
    add_completion=False,
)
_COLUMNS = ["PROVIDER", "TEMPLATE", "IMAGE", "MEMORY", "READY", "STARTING", "WANTED", "CLAIMED", "COLD", "LAST FAILURE"]


@app.command("ls")
def ls(json: options.Json = False) -> None:
    """List the pools: what is ready, what was claimed, and how many sandboxes had to start cold.

    \b
    carrel pool ls
    """
    with connected() as client:
        found = client.pools()
    print_items(found, json, _COLUMNS, _row)
    if not found and not json:
        note("there are no pools yet: the first sandbox of a provider that starts slowly makes one")


def _row(info: PoolInfo) -> list[str]:
    counts = (info.ready, info.starting, info.wanted, info.claimed, info.cold_starts)
    memory = "-" if info.memory_mb is None else f"{info.memory_mb} MB"
    return [
        info.provider,
        info.template or "-",
        info.image or "-",
        memory,
        *map(str, counts),
        info.last_failure or "-",
    ]


@app.command("resize")
def resize(
    pool: Annotated[str, typer.Argument(metavar="PROVIDER|TEMPLATE", help="Whose pools.")],
    size: Annotated[int, typer.Argument(metavar="N", min=0, help="Warm sandboxes of each pool; 0 ends them.")],
    json: options.Json = False,
) -> None:
    """Change how many warm sandboxes each pool of a provider or a template keeps, until the server ends.

    For administrators.

    \b
    carrel pool resize docker 4
    carrel pool resize data-science 0
    """
    with connected() as client:
        found = client.resize_pool(pool, size)
    print_items(found, json, _COLUMNS, _row)
    if not json and not found:
        note(f"the pools of {pool} will have {size}; none is in use yet")
