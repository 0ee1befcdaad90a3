"""`port`: the open ports of a sandbox, a URL for one, or a port of this machine that leads to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from carrel.cli import options
from carrel.cli.connecting import attached
from carrel.cli.failures import note
from carrel.cli.printing import plain, print_done, print_items, print_json

if TYPE_CHECKING:
    from carrel.models import PortInfo

Port = Annotated[
    int | None,
    typer.Argument(metavar="[PORT]", min=1, max=65_535, help="A port of the sandbox; without it, list them."),
]


def port(
    context: options.Context,
    port: Port = None,
    local: Annotated[
        str | None,
        typer.Option(
            "--local",
            "-l",
            metavar="[ADDRESS:]PORT",
            help="Forward this local port until Ctrl-C; 0 picks one. The address is 127.0.0.1 by default.",
        ),
    ] = None,
    expires: Annotated[
        float | None,
        typer.Option("--expires", metavar="SECONDS", help="How long the URL is valid; by default an hour."),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Let everybody reach it, until --close; only where the server allows it.")
    ] = False,
    wake: Annotated[
        bool, typer.Option("--wake", help="Let a request start the sandbox again if it is stopped.")
    ] = False,
    wait: Annotated[
        float | None, typer.Option("--wait", metavar="SECONDS", help="First wait until a server listens on the port.")
    ] = None,
    close: Annotated[bool, typer.Option("--close", help="Make a public port private again.")] = False,
    json: options.Json = False,
) -> None:
    """Print a URL of a port of a sandbox, or forward a local port to it.

    \b
    carrel port conversation-42
    carrel port conversation-42 8000
    carrel port conversation-42 5432 --local 5432
    """
    if local is not None and (public or wake or close or expires is not None):
        raise typer.BadParameter("a forwarded port has no URL: leave --public, --wake, --close and --expires out")
    if port is None and (local is not None or public or close or wait is not None or wake or expires is not None):
        raise typer.BadParameter("name the port of the sandbox")
    if port is not None and local is not None:
        _forward(context, port, local, wait)
        return
    with attached(context) as box:
        if port is None:
            print_items(box.ports.list(), json, ["PORT", "ADDRESSES"], _row)
        elif close:
            box.ports.close(port)
            if json:
                print_done(closed=port)
        else:
            if wait is not None:
                box.ports.wait(port, wait)
            if json:
                print_json(box.ports.share(port, expires=expires, public=public, wake=wake).model_dump(mode="json"))
            else:
                typer.echo(box.ports.url(port, expires=expires, public=public, wake=wake))


def _row(info: PortInfo) -> list[str]:
    return [str(info.port), plain(" ".join(info.addresses))]


def _forward(context: str, port: int, local: str, wait: float | None) -> None:
    import asyncio

    from carrel.cli.port_forwarding import forward

    host, _, number = local.rpartition(":")
    if not (number.isascii() and number.isdigit() and int(number) <= 65_535):
        raise typer.BadParameter("write --local PORT or --local ADDRESS:PORT")

    def listening(address: str) -> None:
        note(f"carrel: {address} leads to port {port} of '{context}'; Ctrl-C ends it")

    asyncio.run(forward(context, port, host.strip("[]") or "127.0.0.1", int(number), wait, listening, note))
