"""`token`: create, list and revoke API tokens."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from carrel.cli import options
from carrel.cli.connecting import connected
from carrel.cli.failures import note
from carrel.cli.printing import age, coloured, print_done, print_items, print_json

if TYPE_CHECKING:
    from rich.text import Text

    from carrel.models import TokenInfo

app = typer.Typer(help="API tokens: who may do what, and in which contexts.", no_args_is_help=True)

_UNITS = {"m": 60, "h": 3600, "d": 86_400}
_COLOURS = {"good": "green", "expired": "bright_black", "revoked": "red"}


@app.command("create")
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of its owner, as the audit log records it.")],
    kind: Annotated[str, typer.Option(help="person, agent or service.")],
    scope: Annotated[list[str], typer.Option(help="read, operate, approve, administer or log; repeatable.")],
    namespace: Annotated[
        str | None,
        typer.Option(help="Only contexts of this namespace, which is the part of an id before the first colon."),
    ] = None,
    context: Annotated[
        list[str] | None, typer.Option(help="Only this context; repeatable.", autocompletion=options.contexts)
    ] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="How long it is valid, such as 12h or 30d. Default: for ever.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Create a token and print it. It cannot be printed again. Its owner uses it as CARREL_TOKEN.

    \b
    carrel token create coder --kind agent --scope operate --namespace team --expires 30d
    carrel token create ann --kind person --scope approve
    """
    with connected() as client:
        made = client.tokens.create(
            name, kind=kind, scopes=scope, namespace=namespace, contexts=context, expires=_duration(expires)
        )
    if json:
        print_json(made)
        return
    print(made.token)
    note(f"{made.id} for {made.kind}:{made.name}; it cannot be printed again")


@app.command("ls")
def ls(
    every: Annotated[bool, typer.Option("--all", "-a", help="Also revoked and expired tokens.")] = False,
    json: options.Json = False,
) -> None:
    """List tokens, newest first, without their secret values.

    \b
    carrel token ls
    """
    with connected() as client:
        found = [info for info in client.tokens.list() if every or _state(info) == "good"]
    print_items(found, json, ["ID", "WHO", "SCOPES", "REACHES", "STATE", "AGE", "USED", "EXPIRES"], _row)


@app.command("revoke")
def revoke(
    ids: Annotated[list[str], typer.Argument(metavar="ID", help="Ids from `carrel token ls`.")],
    json: options.Json = False,
) -> None:
    """Revoke tokens: at once on this server, within seconds on others.

    \b
    carrel token revoke tok-1f2e3d4c5b6a7988
    """
    with connected() as client:
        for each in ids:
            client.tokens.revoke(each)
            if not json:
                print(f"revoked {each}")
    if json:
        print_done(revoked=ids)


def _row(info: TokenInfo) -> list[str | Text]:
    return [
        info.id,
        f"{info.kind}:{info.name}",
        ", ".join(info.scopes),
        ", ".join(info.contexts) if info.contexts else f"{info.namespace}:*" if info.namespace else "everything",
        coloured(state := _state(info), _COLOURS[state]),
        age(info.created_at),
        age(info.used_at) if info.used_at else "never",
        f"{info.expires_at.astimezone():%Y-%m-%d %H:%M}" if info.expires_at else "never",
    ]


def _state(info: TokenInfo) -> str:
    if info.revoked_at is not None:
        return "revoked"
    return "expired" if info.expires_at is not None and info.expires_at <= datetime.now(UTC) else "good"


def _duration(text: str | None) -> timedelta | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,6})([mhd])", text.strip())
    if found is None or not int(found[1]):
        raise typer.BadParameter(f"'{text}' is not a duration such as 12h or 30d", param_hint="--expires")
    return timedelta(seconds=int(found[1]) * _UNITS[found[2]])
