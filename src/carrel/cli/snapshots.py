"""Snapshots: take, list, restore, fork, compare, download."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from carrel.cli import options
from carrel.cli.connecting import attached
from carrel.cli.failures import note
from carrel.cli.printing import age, plain, print_done, print_json, print_table, size
from carrel.cli.progress import copying, waiting

Context = options.Context


def snapshot(context: Context, json: options.Json = False) -> None:
    """Take a snapshot of a workspace. Running commands go on.

    \b
    carrel snapshot conversation-42
    """
    with waiting(f"taking a snapshot of {context}", quiet=json), attached(context) as box:
        made = box.snapshot()
    if json:
        print_json(made)
    else:
        # Volumes that take snapshots in the file system count nothing.
        files = [] if made.files is None else [f"{made.files} files"]
        new = [] if made.new_bytes is None else [f"{size(made.new_bytes)} new"]
        typer.echo(f"{made.id}  {', '.join([*files, size(made.bytes or 0), *new])}")


def snapshots(context: Context, json: options.Json = False) -> None:
    """List the snapshots of a workspace, newest first.

    \b
    carrel snapshots conversation-42
    """
    with attached(context) as box:
        found = box.snapshots()
    if json:
        print_json(found)
        return
    rows = [
        [
            each.id,
            each.status,
            age(each.created_at),
            "-" if each.files is None else str(each.files),
            "-" if each.bytes is None else size(each.bytes),
            "-" if each.new_bytes is None else size(each.new_bytes),
        ]
        for each in found
    ]
    print_table(["ID", "STATUS", "AGE", "FILES", "SIZE", "NEW"], rows)


def restore(
    context: Context,
    snapshot_id: Annotated[str, typer.Argument(metavar="SNAPSHOT", help="See `carrel snapshots`.")],
    json: options.Json = False,
) -> None:
    """Replace the files of a workspace by those of a snapshot. Running commands are killed.

    \b
    carrel restore conversation-42 snap-0123456789abcdef
    """
    with waiting(f"restoring {context}", quiet=json), attached(context) as box:
        info = box.restore(snapshot_id)
    if json:
        print_json(info)
    else:
        note(f"restored {context} to {snapshot_id}")


def fork(
    context: Context,
    new_context: Annotated[str, typer.Argument(metavar="NEW", help="The id of the new context.")],
    snapshot_id: Annotated[
        str | None, typer.Option("--snapshot", help="Use the files of this snapshot. Default: the files of now.")
    ] = None,
    no_secrets: Annotated[bool, typer.Option("--no-secrets", help="Do not copy the secrets.")] = False,
    json: options.Json = False,
) -> None:
    """Create a new context with the same files, settings and secrets.

    \b
    carrel fork conversation-42 conversation-43
    carrel fork --no-secrets conversation-42 conversation-43
    """
    with waiting(f"forking {context}", quiet=json), attached(context) as box:
        info = box.fork(new_context, snapshot_id, secrets=not no_secrets).info()
    if json:
        print_json(info)
    else:
        note(f"forked {context} to {new_context}")


def diff(
    context: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN|CONTEXT", help="A run on this folder, or a context.", autocompletion=options.contexts
        ),
    ] = None,
    before: Annotated[str | None, typer.Argument(metavar="BEFORE", help="The older snapshot.")] = None,
    after: Annotated[str | None, typer.Argument(metavar="AFTER", help="The newer snapshot.")] = None,
    patch: Annotated[bool, typer.Option("--patch", help="Show the changed lines of text files.")] = False,
    path: Annotated[str | None, typer.Option("--path", "-p", metavar="PATH", help="Only this file or folder.")] = None,
    now: Annotated[bool, typer.Option("--now", help="Show all changes since the run began, by anybody.")] = False,
    json: options.Json = False,
) -> None:
    """Show the changes of the last run of an agent on the current folder, or those between two snapshots.

    \b
    carrel diff
    carrel diff --patch --path src
    carrel diff conversation-42 snap-0123456789abcdef snap-fedcba9876543210
    """
    if before is None or context is None:
        from carrel.cli.here.runs import show_diff

        show_diff(context, path, patch=patch, now=now, json=json)
        return
    if after is None:
        raise typer.BadParameter("a context needs two snapshots; see `carrel snapshots`", param_hint="AFTER")
    if patch or path or now:
        raise typer.BadParameter("this is for runs on a folder, not for snapshots", param_hint="--patch, --path, --now")
    with attached(context) as box:
        changes = box.diff(before, after)
    if json:
        print_json(changes)
        return
    signs = {"added": "+", "removed": "-", "changed": "~"}
    for change in changes:
        typer.echo(f"{signs[change.kind]} {plain(change.path)}")


def download(
    context: Context,
    snapshot_id: Annotated[str, typer.Argument(metavar="SNAPSHOT", help="See `carrel snapshots`.")],
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Default: SNAPSHOT.tar; - is standard output.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Download the files of a snapshot as a tar archive.

    \b
    carrel download conversation-42 snap-0123456789abcdef -o work.tar
    carrel download conversation-42 snap-0123456789abcdef -o - | tar -tv
    """
    if output == "-" and json:
        raise typer.BadParameter("standard output is used for the archive", param_hint="--json")
    if output == "-" and sys.stdout.isatty():
        raise typer.BadParameter("a tar archive cannot be shown on a terminal", param_hint="--output")
    name = output or f"{snapshot_id}.tar"
    with attached(context) as box:
        if name == "-":
            box.download_snapshot(snapshot_id, sys.stdout.buffer)
            sys.stdout.buffer.flush()
            return
        with copying(name) as advance:
            box.download_snapshot(snapshot_id, name, progress=advance)
    if json:
        print_done(wrote=name)
    else:
        note(f"wrote {name}")
