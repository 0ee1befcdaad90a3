"""`sync` and `filespace`: sync a workspace with its filespace; list, get, put and remove files of a filespace."""

from __future__ import annotations

import os
import sys
from pathlib import Path, PurePosixPath
from typing import Annotated

import typer

from carrel.cli import options
from carrel.cli.connecting import attached, connected
from carrel.cli.failures import note
from carrel.cli.printing import plain, print_done, print_json, print_table, size
from carrel.cli.progress import copying, waiting
from carrel.errors import InvalidRequest

app = typer.Typer(
    help="Files of a context's filespace, whether a sandbox runs or not.", no_args_is_help=True, add_completion=False
)

Owner = Annotated[str, typer.Argument(metavar="CONTEXT", help="A context id.", autocompletion=options.contexts)]
Remote = Annotated[str, typer.Argument(metavar="PATH", help="A path in the filespace.")]


def sync(
    context: options.Context,
    push: Annotated[bool, typer.Option("--push", help="Only copy changes of the workspace to the filespace.")] = False,
    pull: Annotated[bool, typer.Option("--pull", help="Only copy changes of the filespace to the workspace.")] = False,
    json: options.Json = False,
) -> None:
    """Sync a workspace with its filespace: pull, then push. If both sides changed a file, the last change wins.

    \b
    carrel sync conversation-42
    carrel sync conversation-42 --push
    """
    if push and pull:
        raise typer.BadParameter("give one of them, or none for both directions", param_hint="--push --pull")
    direction = "push" if push else "pull" if pull else "both"
    with waiting(f"syncing {context}", quiet=json), attached(context) as box:
        done = box.sync(direction)
    if json:
        print_json(done)
        return
    parts = []
    if not pull:
        parts.append(f"pushed {done.pushed} files, {size(done.pushed_bytes)}, deleted {done.push_deleted}")
    if not push:
        parts.append(f"pulled {done.pulled} files, {size(done.pulled_bytes)}, deleted {done.pull_deleted}")
    typer.echo("; ".join(parts))
    for path in done.conflicts:
        note(f"carrel: both sides have changed {plain(path)}")


@app.command("ls")
def list_files(
    context: Owner,
    path: Annotated[str, typer.Argument(metavar="PATH", help="Only files whose path begins with this.")] = "",
    json: options.Json = False,
) -> None:
    """List the files of a filespace.

    \b
    carrel filespace ls conversation-42
    carrel filespace ls conversation-42 data/
    """
    with connected() as client:
        found = list(client.filespace(context).list(path))
    if json:
        print_json(found)
        return
    rows = [[each.mode, size(each.size), f"{each.updated_at:%Y-%m-%d %H:%M}", each.path] for each in found]
    print_table(["MODE", "SIZE", "UPDATED", "PATH"], rows)


@app.command("get")
def get(
    context: Owner,
    path: Remote,
    local: Annotated[str, typer.Argument(metavar="FILE", help="The local file to write; - is standard output.")] = "-",
    json: options.Json = False,
) -> None:
    """Copy a file out of a filespace.

    \b
    carrel filespace get conversation-42 output/report.txt
    carrel filespace get conversation-42 output/report.txt report.txt
    """
    from carrel.client._sync.files import save_as

    if json and local == "-":
        raise typer.BadParameter("standard output is used for the file", param_hint="--json")
    with connected() as client:
        pieces = client.filespace(context).stream(path)
        if local == "-":
            for piece in pieces:
                sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
            return
        target = Path(local)
        if target.is_dir():
            target /= PurePosixPath(path).name
        save_as(pieces, target, 0o666, None)
    if json:
        print_done(copied=path, to=str(target))


@app.command("put")
def put(
    context: Owner,
    path: Remote,
    local: Annotated[str, typer.Argument(metavar="FILE", help="The local file to read; - is standard input.")] = "-",
    json: options.Json = False,
) -> None:
    """Copy a file into a filespace. The workspace gets it at its next pull.

    \b
    carrel filespace put conversation-42 data/in.csv in.csv
    echo hello | carrel filespace put conversation-42 greeting.txt
    """
    with connected() as client:
        filespace = client.filespace(context)
        if local == "-":
            made = filespace.write(path, sys.stdin.buffer)
        else:
            try:
                with Path(local).open("rb") as file:
                    info = os.fstat(file.fileno())
                    with copying(path, info.st_size) as advance:
                        made = filespace.write(path, file, mode=info.st_mode & 0o777, progress=advance)
            except OSError as error:
                raise InvalidRequest(f"cannot read {local}: {error.strerror}", field="FILE") from None
    if json:
        print_json(made)


@app.command("rm")
def remove(
    context: Owner,
    path: Annotated[str | None, typer.Argument(metavar="PATH", help="A path in the filespace.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Delete the whole filespace, for good.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: options.Json = False,
) -> None:
    """Delete a file of a filespace, or all files. The workspace drops a single deleted file at its next pull.

    \b
    carrel filespace rm conversation-42 data/in.csv
    carrel filespace rm conversation-42 --all
    carrel filespace rm conversation-42 --all --yes
    """
    if (path is None) is not everything:
        raise InvalidRequest("give one PATH, or --all", field="PATH", hint="see `carrel filespace rm --help`")
    if everything and not yes:
        options.confirm(f"Delete every file of the filespace of {plain(context)}, for good?")
    with connected() as client:
        if path is None:
            client.filespace(context).delete_all()
        else:
            client.filespace(context).delete(path)
    if json:
        print_done(removed=path)
