"""`ls` and `cp`: list the files of a workspace, and copy them from and to local ones."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated

import typer

from carrel.cli import options
from carrel.cli.connecting import connected, find_or_create, find_or_resume, with_approval
from carrel.cli.failures import note
from carrel.cli.printing import coloured, print_done, print_json, print_table, size
from carrel.cli.progress import copying
from carrel.errors import InvalidRequest

if TYPE_CHECKING:
    from carrel.client import Sandbox

_CONTEXT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


def split_target(text: str) -> tuple[str | None, str]:
    """Split `CONTEXT:path`; a local path has no context.

    A context may contain colons, so the last colon with a valid context before it is the separator. `CONTEXT:./a:b`
    is a path with a colon, `./a:b` a local file.
    """
    colon = text.rfind(":")
    while colon > 0:
        if _CONTEXT.fullmatch(text[:colon]):
            return text[:colon], text[colon + 1 :] or "."
        colon = text.rfind(":", 0, colon)
    return None, text


def ls(
    context: options.Context,
    path: Annotated[str, typer.Argument(help="A directory, relative to the workspace.")] = ".",
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="Also list subdirectories.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="List at most this many entries.")] = 1000,
    wait: options.Wait = None,
    json: options.Json = False,
) -> None:
    """List files of a workspace.

    \b
    carrel ls conversation-42
    carrel ls conversation-42 output --recursive
    """
    from carrel.models import FileKind

    with connected() as client:
        box = with_approval(find_or_resume(client, context), None, wait)
        found = box.files.list(path, recursive=recursive, limit=limit)
    if json:
        print_json(found)
    else:
        rows = []
        for info in found:
            directory = info.kind is FileKind.DIRECTORY
            name = coloured(f"{info.path}/", "bold blue") if directory else info.path
            if info.target is not None:
                name = f"{info.path} -> {info.target}"
            count = "-" if directory else size(info.size)
            rows.append([info.mode, count, f"{info.modified_at:%Y-%m-%d %H:%M}", name])
        print_table(["MODE", "SIZE", "MODIFIED", "PATH"], rows)
    if found.truncated:
        note(f"carrel: there are more than {limit} entries; --limit shows more")


@options.takes_sandbox_options
def cp(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A local path, CONTEXT:path, or - for standard input.")],
    destination: Annotated[
        str, typer.Argument(metavar="DST", help="A local path, CONTEXT:path, or - for standard output.")
    ],
    *,
    sandbox: options.SandboxOptions,
    wait: options.Wait = None,
    json: options.Json = False,
) -> None:
    """Copy a file or a directory into a workspace or out of it.

    Copying into a context that has no sandbox creates one.

    \b
    carrel cp data.csv conversation-42:data/in.csv
    carrel cp conversation-42:output ./results
    carrel cp conversation-42:output/report.txt - | less
    """
    if json and destination == "-":
        raise typer.BadParameter("standard output is used for the file", param_hint="--json")

    (from_context, from_path), (to_context, to_path) = split_target(source), split_target(destination)
    if (from_context is None) == (to_context is None):
        raise typer.BadParameter(
            "exactly one side must be CONTEXT:path (write ./name for a local name with a colon)",
            param_hint="SRC DST",
        )
    if to_context is not None and from_path != "-" and not os.path.lexists(from_path):
        raise InvalidRequest(f"there is no local file '{from_path}'", field="SRC")
    with connected() as client:
        if to_context is not None:
            _upload(with_approval(find_or_create(client, to_context, sandbox), None, wait), from_path, to_path)
        elif from_context is not None:
            _download(with_approval(find_or_resume(client, from_context), None, wait), from_path, to_path)
    if json:
        print_done(copied=source, to=destination)


def _upload(box: Sandbox, local: str, path: str) -> None:
    if local == "-":
        if path.endswith(("/", ".")):
            raise InvalidRequest(
                "standard input needs a file name to be written to", field="DST", hint="use CONTEXT:dir/name"
            )
        box.files.write(path, sys.stdin.buffer)
        return
    source = Path(local)
    if _is_directory(box, path):
        path = str(PurePosixPath(path) / source.resolve().name)
    with copying(source.name, _local_size(source)) as advance:
        box.files.upload(source, path, progress=advance)


def _download(box: Sandbox, path: str, local: str) -> None:
    if local == "-":
        box.files.download(path, sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return
    target = Path(local)
    name = PurePosixPath(path).name
    # The name is one path component, so it cannot lead out of the target directory.
    if target.is_dir() and name not in {"", ".", ".."}:
        target /= name
    with copying(path, _remote_size(box, path)) as advance:
        box.files.download(path, target, progress=advance)


def _is_directory(box: Sandbox, path: str) -> bool:
    from carrel.errors import FileMissing
    from carrel.models import FileKind

    if path.endswith("/") or PurePosixPath(path).name in {"", ".", ".."}:
        return True
    try:
        return box.files.stat(path).kind is FileKind.DIRECTORY
    except FileMissing:
        return False


def _local_size(source: Path) -> int:
    if source.is_dir():
        return sum(entry.stat().st_size for entry in source.rglob("*") if entry.is_file())
    return source.stat().st_size


def _remote_size(box: Sandbox, path: str) -> int | None:
    from carrel.models import FileKind

    info = box.files.stat(path)
    return info.size if info.kind is FileKind.FILE else None
