"""Runs of agents on the current folder: `undo`, `log`, and the part of `diff` that is for folders.

A run is what happened between two checkpoints of the folder: one before a sandbox started on it, one when it had ended.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from carrel.cli import options
from carrel.cli.failures import note
from carrel.cli.here.server import client_for
from carrel.cli.here.words import TYPED
from carrel.cli.printing import age, plain, print_json, print_table, size
from carrel.cli.progress import waiting
from carrel.errors import ApprovalNeeded, Denied, NotFound

if TYPE_CHECKING:
    from carrel.client import Client
    from carrel.models import CheckpointInfo, FolderChange, FolderChanges, SandboxInfo

SIGNS = {"added": "+", "removed": "-", "changed": "~"}
_MOST_RECORDS = 10_000
_MOST_NAMED = 20
_REFUSED = (ApprovalNeeded.code, Denied.code)

Run = Annotated[
    str | None, typer.Argument(metavar="RUN", help="The id of a run; see `carrel log`. Default: the last run.")
]


@dataclass(frozen=True)
class FolderRun:
    """One run on a folder. It has no end while it lasts, or if it was killed."""

    box: SandboxInfo
    start: CheckpointInfo
    end: CheckpointInfo | None


def _contexts(client: Client, folder: str) -> list[SandboxInfo]:
    """Return the sessions that work on a folder, or on the nearest folder above it."""
    for state in (None, "terminated"):
        found: dict[str, list[SandboxInfo]] = {}
        seen: set[str] = set()
        for box in client.sandboxes(state=state):
            path = box.workspace_path
            if path is None or box.context_id is None or box.context_id in seen:
                continue
            if folder == path or folder.startswith(path.rstrip("/") + "/"):
                seen.add(box.context_id)
                found.setdefault(path, []).append(box)
        if found:
            return found[max(found, key=len)]
    return []


def find_runs(client: Client, folder: str) -> list[FolderRun]:
    """Return the runs on a folder, newest first; `NotFound` if there are none."""
    runs: list[FolderRun] = []
    for box in _contexts(client, folder):
        kept = client.checkpoints(box.context_id or "").list()
        ends = {each.begin: each for each in reversed(kept) if each.begin is not None}
        runs += [FolderRun(box, each, ends.get(each.id)) for each in kept if each.kind != "end"]
    if not runs:
        raise NotFound(
            f"no agent has worked on {folder}, as far as this server knows",
            hint="start one with `carrel here -- PROGRAM`, or change to the folder it worked on",
        )
    return sorted(runs, key=lambda run: run.start.created_at, reverse=True)


def find_run(client: Client, folder: str, chosen: str | None) -> FolderRun:
    """Return a run on a folder by its id. Without one, the run of an agent that ended last: others may have begun and
    ended while it lasted.
    """
    runs = find_runs(client, folder)
    found = [run for run in runs if (run.start.kind == "start" if chosen is None else run.start.id == chosen)]
    if not found:
        what = "run of an agent" if chosen is None else f"run '{chosen}'"
        raise NotFound(f"there is no {what} on {folder}", hint="`carrel log` lists the runs")
    return max(found, key=lambda run: (run.end or run.start).created_at)


def here() -> str:
    """Return the current folder, with links resolved as the server records it."""
    return os.path.realpath(os.getcwd())


def show_diff(chosen: str | None, path: str | None, *, patch: bool, now: bool, json: bool) -> None:
    """Print the changes of a run on the current folder."""
    folder = here()
    with client_for(folder) as client:
        run = find_run(client, folder, chosen)
        until = None if now or run.end is None else run.end.id
        kept = client.checkpoints(run.start.context_id)
        if patch:
            made = kept.patch(run.start.id, until, None if path is None else _below(run, path))
            if json:
                print_json(made)
                return
            # Line ends are the file's own; other control characters could fool the terminal.
            typer.echo("\n".join(plain(line.replace("\t", "    ")) for line in made.text.split("\n")), nl=False)
            for each in made.omitted:
                note(f"not shown, because it is no small text file: {plain(each)}")
            if made.truncated:
                note("more files have changed than are shown; name one with --path")
            return
        changes = kept.changes(run.start.id, until)
    if json:
        print_json(changes)
        return
    wanted = None if path is None else _below(run, path)
    shown = [each for each in changes.items if wanted is None or f"{each.path}/".startswith(f"{wanted}/")]
    if shown:
        print_table(["", "PATH", "BEFORE", "AFTER"], [_row(each) for each in shown])
    note(f"{_counts(changes)} by {plain(run.start.context_id)}, {age(run.start.created_at)} ago")
    _tell_unrecorded(run)


def _row(change: FolderChange) -> list[str]:
    def state(kind: str | None, length: int | None, mode: str | None, other: str | None) -> str:
        if kind is None:
            return "-"
        text = kind if length is None else size(length)
        return f"{text} {mode}" if mode is not None and mode != other else text

    before = state(change.type_before, change.bytes_before, change.mode_before, change.mode_after)
    after = state(change.type_after, change.bytes_after, change.mode_after, change.mode_before)
    return [SIGNS[change.kind], change.path, before, after]


def _counts(changes: FolderChanges) -> str:
    if not (changes.added or changes.removed or changes.changed):
        return "nothing was changed"
    more = ", more than are listed" if changes.truncated else ""
    return f"{changes.added} added, {changes.removed} removed, {changes.changed} changed{more}"


def _tell_unrecorded(run: FolderRun) -> None:
    last = run.end or run.start
    if last.ignored_count:
        names = ", ".join(plain(each) for each in last.ignored[:_MOST_NAMED])
        more = "" if last.ignored_count <= _MOST_NAMED else f" and {last.ignored_count - _MOST_NAMED} more"
        note(f"not recorded, because a build makes them again: {names}{more}")
    if last.left_out_count:
        names = ", ".join(plain(each) for each in last.left_out[:_MOST_NAMED])
        note(f"not recorded, because they cannot be: {names}")


def _below(run: FolderRun, path: str) -> str:
    """Return a path of the user, relative to the folder of the run."""
    # The last component may be a link that is meant itself.
    above, name = os.path.split(os.path.abspath(path))
    found = os.path.relpath(os.path.join(os.path.realpath(above), name), run.start.workspace_path)
    if found == ".." or found.startswith("../"):
        raise typer.BadParameter(f"{path} is not in {run.start.workspace_path}", param_hint="--path")
    return found


def undo(
    run_id: Run = None,
    path: Annotated[
        list[str] | None,
        typer.Option("--path", "-p", metavar="PATH", help="Undo only this file or folder. Repeatable."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")] = False,
    json: options.Json = False,
) -> None:
    """Undo the changes of the last run of an agent on the current folder.

    Every byte, mode, link and deleted file comes back. Files that somebody changed after the run are listed and left as
    they are. An undo can be undone: it is a run too.

    \b
    carrel undo
    carrel undo --path src/main.py
    carrel undo --dry-run
    """
    folder = here()
    with client_for(folder) as client:
        run = find_run(client, folder, run_id)
        kept = client.checkpoints(run.start.context_id)
        chosen = None if not path else [_below(run, each) for each in path]
        if run.end is None and run.box.state == "running" and not (json or dry_run):
            note(f"the agent {run.start.context_id} still works on this folder; what it does next is not undone")
        if not (yes or dry_run or json):
            planned = kept.undo(run.start.id, chosen, dry_run=True)
            for change in planned.undone:
                typer.echo(f"{_verb(change.action)} {plain(change.path)}")
            _tell_left([(each.path, each.reason) for each in planned.left], planned.left_count)
            if not planned.undone_count:
                note("nothing to undo")
                return
            typer.confirm(f"Undo {planned.undone_count} changes?", abort=True)
        with waiting("undoing", quiet=json):
            done = kept.undo(run.start.id, chosen, dry_run=dry_run)
    if json:
        print_json(done)
        return
    if dry_run or yes:
        for change in done.undone:
            typer.echo(f"{_verb(change.action)} {plain(change.path)}")
        _tell_left([(each.path, each.reason) for each in done.left], done.left_count)
    if not dry_run:
        note(f"undid {done.undone_count} changes; `carrel undo {done.checkpoint_id}` brings them back")


def _verb(action: str) -> str:
    verbs = {"write": "restore", "make_directory": "restore", "set_attributes": "restore", "remove": "remove"}
    return verbs.get(action, "remove")


def _tell_left(left: Sequence[tuple[str, str]], count: int) -> None:
    for path, reason in left[: 10 * _MOST_NAMED]:
        note(f"left: {plain(path)}: {reason}")
    if count > 10 * _MOST_NAMED:
        note(f"left: {count - 10 * _MOST_NAMED} more")


def log(
    count: Annotated[int, typer.Option("--lines", "-n", min=1, max=1000, help="How many runs to show.")] = 10,
    json: options.Json = False,
) -> None:
    """List the runs of agents on the current folder, newest first.

    For each: how long it took, the files it changed, commands, hosts reached and refused, and approvals.

    \b
    carrel log
    carrel log --json
    """
    folder = here()
    with client_for(folder) as client:
        rows = [_facts(client, run) for run in find_runs(client, folder)[:count]]
    if json:
        print_json(rows)
        return
    columns = ["ID", "CONTEXT", "AGE", "TOOK", "FILES", "COMMANDS", "REACHED", "REFUSED", "APPROVALS"]
    print_table(
        columns,
        [
            [
                str(each["id"]),
                str(each["what"]),
                str(each["age"]),
                "…" if each["seconds"] is None else str(timedelta(seconds=round(float(str(each["seconds"]))))),
                f"+{each['added']} -{each['removed']} ~{each['changed']}",
                str(each["commands"]),
                _few(each["reached"]),
                _few(each["refused"]),
                str(each["approvals"]),
            ]
            for each in rows
        ],
    )


def _few(hosts: object) -> str:
    names = sorted(hosts) if isinstance(hosts, list) else []
    return ", ".join(names[:3]) + (f" +{len(names) - 3}" if len(names) > 3 else "")


def _facts(client: Client, run: FolderRun) -> dict[str, object]:
    changes = client.checkpoints(run.start.context_id).changes(run.start.id, run.end.id if run.end else None)
    until = run.end.created_at if run.end else None
    commands = approvals = 0
    reached: set[str] = set()
    refused: set[str] = set()
    if run.start.kind == "start":
        found = client.audit.search(context_id=run.start.context_id, since=run.start.created_at, until=until)
        for record in islice(found, _MOST_RECORDS):
            if record.name == "decide_approval":
                approvals += record.result == "ok" and record.arguments.get("message") != TYPED
            elif record.kind == "shell" and "command" in record.arguments:
                commands += record.result not in _REFUSED
            elif record.kind == "network" and record.arguments.get("host"):
                (reached if record.decision == "allow" else refused).add(str(record.arguments["host"]))
    return {
        "id": run.start.id,
        "context_id": run.start.context_id,
        "what": "undo" if run.start.kind == "undo" else run.start.context_id,
        "started_at": run.start.created_at.isoformat(),
        "age": age(run.start.created_at),
        "seconds": None if until is None else (until - run.start.created_at).total_seconds(),
        "added": changes.added,
        "removed": changes.removed,
        "changed": changes.changed,
        "commands": commands,
        "reached": sorted(reached),
        "refused": sorted(refused - reached),
        "approvals": approvals,
    }
