"""`templates`: lists the templates of the server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carrel.cli import options
from carrel.cli.connecting import connected
from carrel.cli.printing import coloured, print_json, print_table

if TYPE_CHECKING:
    from rich.text import Text


def templates(json: options.Json = False) -> None:
    """List the templates of the server. `carrel run --template NAME` uses one.

    \b
    carrel templates
    """
    with connected() as client:
        found = client.templates()
    if json:
        print_json(found)
        return
    rows: list[list[str | Text]] = []
    for each in found:
        policy = " ".join(name for name, there in (("settings", each.settings), ("sources", each.sources)) if there)
        limits = " ".join(f"{name}={value:g}" for name, value in each.limits.model_dump(exclude_none=True).items())
        about: str | Text = each.description if each.error is None else coloured(each.error, "red")
        network = "-" if each.network is None else each.network.value
        packages = f"{len(each.packages)} {'ready' if each.built else 'on first use'}" if each.packages else "-"
        rows.append([each.name, each.provider or "-", network, limits or "-", policy or "-", packages, about])
    if rows:
        print_table(["NAME", "PROVIDER", "NETWORK", "LIMITS", "POLICY", "PACKAGES", "DESCRIPTION"], rows)
