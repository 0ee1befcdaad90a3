"""`templates`: lists the templates of the server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carrel.cli import options
from carrel.cli.connecting import connected
from carrel.cli.printing import coloured, print_items

if TYPE_CHECKING:
    from rich.text import Text

    from carrel.models import TemplateInfo


def templates(json: options.Json = False) -> None:
    """List the templates of the server. `carrel run --template NAME` uses one.

    \b
    carrel templates
    """
    with connected() as client:
        found = client.templates()
    print_items(found, json, ["NAME", "PROVIDER", "NETWORK", "LIMITS", "POLICY", "PACKAGES", "DESCRIPTION"], _row)


def _row(info: TemplateInfo) -> list[str | Text]:
    policy = " ".join(name for name, there in (("settings", info.settings), ("sources", info.sources)) if there)
    limits = " ".join(f"{name}={value:g}" for name, value in info.limits.model_dump(exclude_none=True).items())
    about: str | Text = info.description if info.error is None else coloured(info.error, "red")
    network = "-" if info.network is None else info.network.value
    packages = f"{len(info.packages)} {'ready' if info.built else 'on first use'}" if info.packages else "-"
    return [info.name, info.provider or "-", network, limits or "-", policy or "-", packages, about]
