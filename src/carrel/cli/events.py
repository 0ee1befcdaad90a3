"""`events`: what happens in contexts."""

from __future__ import annotations

import json as encoding
from typing import TYPE_CHECKING, Annotated

import typer

from carrel.cli import options
from carrel.cli.connecting import connected
from carrel.cli.failures import note
from carrel.cli.printing import plain, print_line

if TYPE_CHECKING:
    from carrel.models import EventInfo

_FIRST = ("state", "command", "exit", "path", "summary", "host", "message", "notice", "snapshot", "tool")
_LEFT_OUT = frozenset({*_FIRST, "operation", "record", "actor", "duration_ms", "bytes_in", "bytes_out", "before"})
_WIDTH = 100


def events(
    context: Annotated[
        str | None, typer.Argument(help="Only of this context.", autocompletion=options.contexts)
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new events, until Ctrl-C.")] = False,
    kind: Annotated[
        list[str] | None, typer.Option("--kind", "-k", help="Only this kind, or family such as `command`; repeatable.")
    ] = None,
    job: Annotated[str | None, typer.Option(metavar="JOB", help="Only of the job with this id.")] = None,
    after: Annotated[int, typer.Option(min=0, help="Begin after the event with this id.")] = 0,
    json: options.Json = False,
) -> None:
    """Show what happened: commands, files, approvals, connections, snapshots, states of sessions.

    \b
    carrel events conversation-42
    carrel events -f --kind command --kind approval
    carrel events -f --job JOB
    """
    found = False
    with connected() as client:
        for event in client.events(context, kinds=kind, job=job, after=after, follow=follow):
            found = True
            if json:
                print_line(event)
            else:
                print(_line(event), flush=True)
    if not found and not json:
        note("there are no events")


def _line(event: EventInfo) -> str:
    when = event.at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    if event.kind == "truncated":
        return f"{when}  the events up to {event.id} were removed"
    where = event.context_id or event.session_id or ""
    return f"{when}  {event.id:>6}  {plain(where)}  {event.kind}  {_told(event.body)}"


def _told(body: dict[str, object]) -> str:
    words = [_word(body[name]) for name in _FIRST if name in body]
    words += [f"{name}={_word(value)}" for name, value in body.items() if name not in _LEFT_OUT]
    text = plain(" ".join(words))
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"


def _word(value: object) -> str:
    return value if isinstance(value, str) else encoding.dumps(value)
