"""`approvals`, `approve` and `deny`: operations that wait for a person, and the decisions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from carrel.cli import options
from carrel.cli.connecting import connected_to_each
from carrel.cli.failures import note, print_error
from carrel.cli.printing import age, coloured, plain, print_json, print_line, print_table
from carrel.errors import NotFound, ServerUnreachable

if TYPE_CHECKING:
    from rich.text import Text

    from carrel.client import Client
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
    with connected_to_each() as clients:
        if watch:
            for info in _watch(clients):
                if context in {None, info.context_id}:
                    _print_change(info, json)
            raise ServerUnreachable("the server stopped, which ended the watch", hint="watch again when it is back")
        found = _list(clients, None if every else "pending", context)
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
    with connected_to_each() as clients:
        info = _server_of(clients, name).approvals.get(name)
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
    with connected_to_each() as clients:
        decisions = {approve: ids} if ids else _ask(_list(clients, "pending"), json=json)
        refused = False
        for allowed, names in decisions.items():
            known: dict[Client, list[str]] = {}
            for name in names:
                known.setdefault(_server_of(clients, name), []).append(name)
            for client, its in known.items():
                if allowed:
                    result = client.approvals.decide_many(its, approve=True, scope=scope, rule=rule, message=message)
                else:  # a denial has neither scope nor rule
                    result = client.approvals.decide_many(its, approve=False, message=message)
                _print_decisions(result, json)
                refused = refused or bool(result.refused)
    raise typer.Exit(1 if refused else 0)


def _list(clients: list[Client], state: str | None, context: str | None = None) -> list[ApprovalInfo]:
    """Return the approvals at all servers, newest first."""
    found = [info for client in clients for info in client.approvals.list(state=state, context_id=context)]
    return sorted(found, key=lambda info: info.created_at, reverse=True)


def _server_of(clients: list[Client], name: str) -> Client:
    """Return the server that has an approval. One that none has is asked for at the first, whose error says so."""
    for client in clients[1:]:
        with suppress(NotFound):
            client.approvals.get(name)
            return client
    return clients[0]


def _watch(clients: list[Client]) -> Iterator[ApprovalInfo]:
    """Yield changes at all servers as they happen, until the last of them has stopped."""
    from queue import SimpleQueue
    from threading import Thread

    changes: SimpleQueue[ApprovalInfo | Exception | None] = SimpleQueue()

    def watch(client: Client) -> None:
        try:
            for info in client.approvals.watch():
                changes.put(info)
            changes.put(None)
        except Exception as error:  # raised below, in the thread that prints it
            changes.put(error)

    for client in clients:
        Thread(target=watch, args=(client,), daemon=True).start()
    left = len(clients)
    while left:
        change = changes.get()
        if change is None:
            left -= 1
        elif isinstance(change, Exception):
            raise change
        else:
            yield change


def _ask(waiting: list[ApprovalInfo], *, json: bool) -> dict[bool, list[str]]:
    """Ask the person at the terminal about each approval; return the ids to approve and the ids to deny."""
    if json or not sys.stdin.isatty():
        raise typer.BadParameter("give one or more ids; `carrel approvals` lists them", param_hint="ID")
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
