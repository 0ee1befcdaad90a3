"""`approvals`, `approve` and `deny`: operations that wait for a person, and the decisions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from carrel.cli import options
from carrel.cli.connecting import connected
from carrel.cli.failures import note, print_error
from carrel.cli.printing import age, coloured, plain, print_json, print_line, print_table
from carrel.errors import ServerUnreachable

if TYPE_CHECKING:
    from rich.text import Text

    from carrel.models import ApprovalBatchResult, ApprovalInfo

Ids = Annotated[
    list[str] | None,
    typer.Argument(metavar="ID", help="Ids from `carrel approvals`. Without one, you are asked for each in turn."),
]
Message = Annotated[str | None, typer.Option("--message", "-m", help="A message to the agent.")]
app = typer.Typer(invoke_without_command=True, add_completion=False)
_COLOURS = {"pending": "yellow", "approved": "green", "denied": "red", "expired": "bright_black"}
_ANSWERS = {"y": True, "yes": True, "n": False, "no": False, "s": None, "skip": None, "q": None, "quit": None}
_OWN_HINT = (
    "let the agent use a token of its own: Client() in a program on the server's machine does, "
    "or set CARREL_TOKEN to the token in `agent-token` of the data directory"
)
_MOMENT = "%Y-%m-%d %H:%M:%S"


@app.callback()
def approvals(
    context_: typer.Context,
    every: Annotated[bool, typer.Option("--all", "-a", help="Also decided and expired approvals.")] = False,
    context: Annotated[
        str | None, typer.Option("--context", "-c", help="Only of this context.", autocompletion=options.contexts)
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Print changes as they happen, until Ctrl-C.")] = False,
    json: options.Json = False,
) -> None:
    """List operations of agents that wait for approval.

    \b
    carrel approvals
    carrel approvals --watch
    carrel approvals show apr-1f2e3d4c5b6a7988
    """
    if context_.invoked_subcommand is not None:
        return
    with connected() as client:
        if watch:
            for info in client.approvals.watch():
                if context in {None, info.context_id}:
                    _print_change(info, json)
            raise ServerUnreachable("the server stopped, which ended the watch", hint="watch again when it is back")
        found = list(client.approvals.list(state=None if every else "pending", context_id=context))
    if json:
        print_json(found)
    elif found:
        _show(found)
    else:
        note("no operation waits for approval" if not every else "no operation has waited for approval")


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(metavar="ID", help="An id from `carrel approvals`.")],
    json: options.Json = False,
) -> None:
    """Show an approval with all arguments of the operation. Control characters are escaped.

    \b
    carrel approvals show apr-1f2e3d4c5b6a7988
    carrel approvals show apr-1f2e3d4c5b6a7988 --json
    """
    with connected() as client:
        info = client.approvals.get(name)
    if json:
        print_json(info)
        return
    for line in _whole(info):
        print(plain(line))


def approve(
    ids: Ids = None,
    for_context: Annotated[
        bool, typer.Option("--for-context", help="Allow the same operation in its context from now on.")
    ] = False,
    rule: Annotated[
        str | None,
        typer.Option(metavar="RULE", help="Add this rule to the policy of the context: 'shell(git push:*)'."),
    ] = None,
    message: Message = None,
    json: options.Json = False,
) -> None:
    """Approve operations of agents: once, unless --for-context or --rule is given.

    Without an id, at a terminal, it shows each operation that waits and asks you.

    \b
    carrel approve
    carrel approve apr-1f2e3d4c5b6a7988
    carrel approve apr-1f2e3d4c5b6a7988 --rule 'shell(git push:*)' -m 'this branch only, please'
    """
    if for_context and rule is not None:
        raise typer.BadParameter("choose --for-context or --rule", param_hint="--rule")
    scope = "rule" if rule is not None else "context" if for_context else "once"
    _decide(ids, approve=True, scope=scope, rule=rule, message=message, json=json)


def deny(ids: Ids = None, message: Message = None, json: options.Json = False) -> None:
    """Deny operations of agents. The agent receives the message.

    Without an id, at a terminal, it shows each operation that waits and asks you.

    \b
    carrel deny
    carrel deny apr-1f2e3d4c5b6a7988
    carrel deny apr-1f2e3d4c5b6a7988 -m 'use the test database'
    """
    _decide(ids, approve=False, scope="once", rule=None, message=message, json=json)


def _decide(
    ids: list[str] | None, *, approve: bool, scope: str, rule: str | None, message: str | None, json: bool
) -> None:
    with connected() as client:
        if not ids:
            decisions = _ask(client.approvals.list(state="pending"), json=json)
        else:
            decisions = {approve: ids}
        refused = False
        for allowed, names in decisions.items():
            if allowed:
                result = client.approvals.decide_many(names, approve=True, scope=scope, rule=rule, message=message)
            else:  # a denial has neither scope nor rule
                result = client.approvals.decide_many(names, approve=False, message=message)
            _print_decisions(result, json)
            refused = refused or bool(result.refused)
    raise typer.Exit(1 if refused else 0)


def _ask(pending: Iterator[ApprovalInfo], *, json: bool) -> dict[bool, list[str]]:
    """Ask the person at the terminal about each approval; return the ids to approve and the ids to deny."""
    if json or not sys.stdin.isatty():
        raise typer.BadParameter("give one or more ids; `carrel approvals` lists them", param_hint="ID")
    waiting = list(pending)
    if not waiting:
        note("no operation waits for approval")
    decisions: dict[bool, list[str]] = {}
    for info in reversed(waiting):  # oldest first
        for line in _whole(info):
            note(plain(line))
        answer = ""
        while answer not in _ANSWERS:
            answer = typer.prompt("approve it? y yes, n no (deny), s skip, q quit", err=True).strip().lower()
        if answer in {"q", "quit"}:
            break
        if (decided := _ANSWERS[answer]) is not None:
            decisions.setdefault(decided, []).append(info.id)
    return decisions


def _print_decisions(result: ApprovalBatchResult, json: bool) -> None:
    if json:
        print_json(result)
        return
    for info in result.decided:
        print(f"{info.state} {info.id} {plain(info.summary)}")
    for name, why in result.refused.items():
        print_error(f"{name}: {why}", _OWN_HINT if "own request" in why else None)


def _print_change(info: ApprovalInfo, json: bool) -> None:
    if json:
        print_line(info)
        return
    where = info.context_id or info.sandbox_id
    what = f"{info.created_at.astimezone():%H:%M:%S} {info.state} {info.id} {where} {info.requested_by}: {info.summary}"
    ending = f" ({info.reason})" if info.state == "pending" else f" (by {info.decided_by})" if info.decided_by else ""
    print(plain(what + ending), flush=True)


def _show(found: list[ApprovalInfo]) -> None:
    rows: list[list[str | Text]] = [
        [
            info.id,
            coloured(info.state, _COLOURS[info.state]),
            age(info.created_at),
            info.context_id or info.sandbox_id,
            info.requested_by,
            info.kind,
            info.summary,
            info.reason if info.decided_by is None else f"{info.decided_by}: {info.message or info.state}",
        ]
        for info in found
    ]
    print_table(["ID", "STATE", "AGE", "CONTEXT", "WHO", "KIND", "WHAT", "WHY"], rows, wrap=True)


def _whole(info: ApprovalInfo) -> Iterator[str]:
    """Yield the lines that show all of an approval, with one line for each line of an argument."""
    from json import dumps

    yield f"{info.id} {info.state}"
    yield f"  who        {info.requested_by}, in {info.context_id or info.sandbox_id}"
    yield f"  when       {info.created_at.astimezone():{_MOMENT}}, expires {info.expires_at.astimezone():{_MOMENT}}"
    yield f"  why        {info.reason}"
    if info.decided_by is not None:
        yield f"  decided    by {info.decided_by}: {info.state}{f', {info.scope}' if info.scope else ''}"
    if info.rule is not None:
        yield f"  rule       {info.rule}"
    if info.message is not None:
        yield f"  message    {info.message}"
    if info.used_at is not None:
        yield f"  used       {info.used_at.astimezone():{_MOMENT}}"
    yield f"  operation  {info.kind} {info.operation}"
    for name, value in sorted(info.arguments.items()):
        first, *rest = (value if isinstance(value, str) else dumps(value)).split("\n")
        yield f"    {name}: {first}"
        yield from (f"    {' ' * len(name)}| {line}" for line in rest)
