"""`doctor` and `version`: what this host can do, and which carrel this is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from carrel.cli import options

if TYPE_CHECKING:
    from rich.text import Text

    from carrel.models import HostReport

_COLOURS = {"ok": "green", "degraded": "yellow", "missing": "red"}


def doctor(
    server: Annotated[bool, typer.Option("--server", help="Ask the running server about its host instead.")] = False,
    json: options.Json = False,
) -> None:
    """Explain what isolation this host offers, what is missing and how to get it. Needs no server.

    Exits with 1 when no isolating provider is available.

    \b
    carrel doctor
    carrel doctor --json | jq '.providers[] | select(.available)'
    """
    report = _asked() if server else _own()
    if json:
        from carrel.cli.shown import print_json

        print_json(report.model_dump(mode="json"))
    else:
        _show(report)
    isolating = any(provider.available and not provider.unsafe for provider in report.providers)
    raise typer.Exit(0 if isolating else 1)


def _asked() -> HostReport:
    from carrel.client import Client

    with Client(administrator=True) as client:
        return client.host()


def _own() -> HostReport:
    from carrel.server import local_host_report

    return local_host_report()


def _show(report: HostReport) -> None:
    from carrel.cli.shown import coloured, plain, print_table

    print(f"kernel {plain(report.kernel)}, user {plain(report.user)}\n")
    rows: list[list[str | Text]] = []
    for check in report.checks:
        remedy = f" Remedy: {check.remedy}" if check.remedy and check.status != "ok" else ""
        status = coloured(check.status, _COLOURS[check.status])
        rows.append([check.name, status, check.found, f"{check.why}{remedy}"])
    print_table(["PRIMITIVE", "STATUS", "FOUND", "WHY IT MATTERS"], rows, wrap=True)
    print()
    rows = []
    for provider in sorted(report.providers, key=lambda each: -each.isolation_level):
        state = coloured("available", "green") if provider.available else coloured("not available", "red")
        name = coloured(f"{provider.name} UNSAFE", "bold red") if provider.unsafe else provider.name
        told = provider.reason or ", ".join(provider.capabilities)
        rows.append([name, str(provider.isolation_level), state, told])
    print_table(["PROVIDER", "ISOLATION", "STATUS", "CAN ENFORCE, OR LACKS"], rows, wrap=True)


def version(json: options.Json = False) -> None:
    """Show the version.

    \b
    carrel version
    """
    from carrel import __version__

    if json:
        from carrel.cli.shown import print_json

        print_json({"version": __version__})
    else:
        print(f"carrel {__version__}")
