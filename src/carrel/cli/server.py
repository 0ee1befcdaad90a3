"""`serve`: starts the server. The only command that imports it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def serve(
    *,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 picks a free one.", show_default="7070")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where workspaces, records and the token are kept.")] = None,
    config: Annotated[Path | None, typer.Option(help="A settings file.", show_default="carrel.toml")] = None,
    provider: Annotated[str | None, typer.Option(help="Default provider of sandboxes.", show_default="auto")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any other setting; repeatable.")
    ] = None,
) -> None:
    """Start the server. It prints its address, where the token is kept and a first command to try.

    The token itself is shown once, by the start that makes it, and only at a terminal.

    \b
    carrel serve
    carrel serve --port 0 --data-dir ./data --set sandbox.memory_mb=512
    """
    from carrel import config as settings
    from carrel.server import serve as start

    flags: dict[str, object] = {
        "host": host,
        "port": port,
        "data_dir": None if data_dir is None else str(data_dir),
        "sandbox.provider": provider,
        "log_level": log_level,
    }
    for word in setting or []:
        name, equals, value = word.partition("=")
        if not equals:
            raise typer.BadParameter(f"'{word}' is not NAME=VALUE", param_hint="--set")
        flags[name] = value
    start(settings.load(flags, config=config))
