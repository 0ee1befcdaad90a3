"""`serve`, `doctor`, `bundle` and `version`: start the server, check this host, make its bundle, print the version."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from carrel.cli import options
from carrel.cli.connecting import connected
from carrel.cli.failures import note
from carrel.cli.printing import coloured, plain, print_json, print_table
from carrel.primitives.imports import importing

if TYPE_CHECKING:
    from rich.text import Text

    from carrel.models import Check, HostReport, LevelStatus

_COLOURS = {"ok": "green", "degraded": "yellow", "missing": "red"}


def serve(
    *,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 picks a free one.", show_default="7070")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="The directory for workspaces, records and tokens.")] = None,
    config: Annotated[Path | None, typer.Option(help="A settings file.", show_default="carrel.toml")] = None,
    provider: Annotated[str | None, typer.Option(help="Default provider of sandboxes.", show_default="auto")] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="Processes that answer requests; 'auto': one for each processor.", show_default="1"
        ),
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any other setting; repeatable.")
    ] = None,
) -> None:
    """Start the server. It prints its address, the file with the token, and a first command to try.

    The token itself is printed once, when it is made, and only at a terminal.

    \b
    carrel serve
    carrel serve --port 0 --data-dir ./data --set sandbox.memory_mb=512
    """
    with importing():
        from carrel.isolation import probe

        probe.begin()
        from carrel import config as settings
        from carrel.server import serve as start

    flags: dict[str, object] = {
        "host": host,
        "port": port,
        "data_dir": None if data_dir is None else str(data_dir),
        "workers": workers,
        "sandbox.provider": provider,
        "log_level": log_level,
    }
    for word in setting or []:
        name, equals, value = word.partition("=")
        if not equals:
            raise typer.BadParameter(f"'{word}' is not NAME=VALUE", param_hint="--set")
        flags[name] = value
    start(settings.load(flags, config=config))


def doctor(
    server: Annotated[bool, typer.Option("--server", help="Check the host of the running server instead.")] = False,
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="Check the cluster of the settings instead.")
    ] = False,
    config: Annotated[
        Path | None, typer.Option(help="A settings file, with --kubernetes.", show_default="carrel.toml")
    ] = None,
    json: options.Json = False,
) -> None:
    """Check which isolation this host offers, what is missing and how to get it. Needs no server.

    Shows the features of the kernel, every isolation level with its providers, and every provider, also those that are
    switched off. Exits with 1 when no isolating provider is available. With `--kubernetes` it shows what the cluster of
    the settings offers for sandboxes, and exits with 1 when something is missing. It makes nothing there.

    \b
    carrel doctor
    carrel doctor --json | jq '.providers[] | select(.available)'
    carrel doctor --kubernetes
    """
    if kubernetes:
        _examine_cluster(config, as_json=json)
    if server:
        with connected() as client:
            report = client.host()
    else:
        from carrel.isolation import probe

        probe.begin()
        from carrel.server import local_host_report

        report = local_host_report()
    if json:
        print_json(report)
    else:
        _show(report)
        if not server:
            note("\nA server started here, with the settings of this shell, finds this. To ask one that runs: --server")
    isolating = any(provider.available and provider.isolation_level > 0 for provider in report.providers)
    raise typer.Exit(0 if isolating else 1)


def _examine_cluster(config: Path | None, *, as_json: bool) -> NoReturn:
    """Show what the cluster offers, and end."""
    with importing():
        from carrel import config as settings
        from carrel.server import local_cluster_report

    report = local_cluster_report(settings.load({}, config=config))
    if as_json:
        print_json(report)
    else:
        print(f"cluster {plain(report.server)}, namespace {plain(report.namespace)}\n")
        _show_checks("PART", report.checks)
    raise typer.Exit(1 if any(check.status == "missing" for check in report.checks) else 0)


def _show_checks(heading: str, checks: list[Check]) -> None:
    rows: list[list[str | Text]] = []
    for check in checks:
        remedy = f" Remedy: {check.remedy}" if check.remedy and check.status != "ok" else ""
        status = coloured(check.status, _COLOURS[check.status])
        rows.append([check.name, status, plain(check.found), f"{check.why}{plain(remedy)}"])
    print_table([heading, "STATUS", "FOUND", "WHY IT MATTERS"], rows, wrap=True)


def _show(report: HostReport) -> None:
    print(f"kernel {plain(report.kernel)}, user {plain(report.user)}\n")
    _show_checks("PRIMITIVE", report.checks)
    print()
    rows: list[list[str | Text]] = []
    for level in report.levels:
        trust = f"trust {', '.join(level.enough_for)}"
        rows.append([f"{level.level}: {level.meaning}", _state(level.available), trust, _serves(level)])
    print_table(["ISOLATION", "STATUS", "ENOUGH FOR", "PROVIDERS, OR WHAT IS MISSING"], rows, wrap=True)
    print()
    rows = []
    for provider in sorted(report.providers, key=lambda each: -each.isolation_level):
        name = coloured(f"{provider.name} UNSAFE", "bold red") if provider.unsafe else provider.name
        enforced = ", ".join(provider.capabilities) if provider.available else None
        origin = None if provider.package is None else f"third-party: {provider.package or 'not installed'}"
        details = "; ".join(filter(None, (origin, provider.reason, enforced)))
        rows.append([name, str(provider.isolation_level), _state(provider.available), details])
    print_table(["PROVIDER", "ISOLATION", "STATUS", "CAN ENFORCE, OR LACKS"], rows, wrap=True)


def _state(available: bool) -> Text:
    return coloured("available", "green") if available else coloured("not available", "red")


def _serves(level: LevelStatus) -> str:
    """Return the providers of a level; where there is none, what is missing."""
    return ", ".join(level.providers) if level.available else "; ".join(level.missing)


def bundle(
    data_dir: Annotated[Path | None, typer.Option(help="The server's data directory.")] = None,
    image: Annotated[Path | None, typer.Option(help="Write the image for pods of Kubernetes to this file.")] = None,
    name: Annotated[str, typer.Option(help="The name of that image.")] = "localhost/carrel-bundle:latest",
    json: options.Json = False,
) -> None:
    """Make the supervisor's bundle for containers, if it is not there yet, and print its path. Needs no server.

    A server makes it by itself when it first needs it. The same installation makes the same bundle. Pods need it as an
    image: `--image` writes an archive as `docker save` does.

    \b
    carrel bundle
    carrel bundle --json | jq -r .digest
    carrel bundle --image bundle.tar --name images.example/carrel-bundle:1
    """
    with importing():
        from carrel import config as settings
        from carrel.server import make_bundle, make_bundle_image

    loaded = settings.load({} if data_dir is None else {"data_dir": str(data_dir)})
    made = make_bundle(loaded) if image is None else make_bundle_image(loaded, image, name)
    if json:
        print_json({"path": made.path, "digest": made.digest, "bytes": made.size, "files": made.files})
    else:
        print(made.path)


def version(json: options.Json = False) -> None:
    """Print the version.

    \b
    carrel version
    """
    from carrel import __version__

    if json:
        print_json({"version": __version__})
    else:
        print(f"carrel {__version__}")
