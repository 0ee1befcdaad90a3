"""`audit`: follow, search, export and verify the audit log. `verify` needs only the exported file, no server."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from carrel.cli import options
from carrel.cli.connecting import connected
from carrel.cli.failures import note, print_error
from carrel.cli.printing import coloured, plain, print_json, print_line, print_table
from carrel.cli.progress import copying
from carrel.errors import InvalidRequest

if TYPE_CHECKING:
    from rich.text import Text

    from carrel.audit import Verification
    from carrel.client import Client
    from carrel.models import AuditRecord

app = typer.Typer(help="The audit log: who did what, and proof of it.", no_args_is_help=True, add_completion=False)

Context = Annotated[
    str | None, typer.Option("--context", "-c", help="Only of this context.", autocompletion=options.contexts)
]
Count = Annotated[int, typer.Option("--lines", "-n", min=0, max=1000, help="How many records to begin with.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Print new records as they come, until Ctrl-C.")]
Kind = Literal["shell", "file", "network", "mcp", "session"]
Decision = Literal["allow", "deny", "ask"]
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_POLL_S = 1.0
_OVERLAP = timedelta(seconds=10)
_WIDTH = 80


@app.command("tail")
def tail(context: Context = None, count: Count = 20, follow: Follow = False, json: options.Json = False) -> None:
    """Show the latest operations, the newest at the end.

    \b
    carrel audit tail
    carrel audit tail -f --context conversation-42
    """
    with connected() as client:
        for records in newest(client, count, follow=follow, context_id=context):
            _show(records, json, follow=follow)


def newest(
    client: Client, count: int, *, follow: bool, context_id: str | None, kind: str | None = None
) -> Iterator[list[AuditRecord]]:
    """Yield the latest records, oldest first; with `follow` also new ones, and again those that have ended since."""
    seen = list(islice(client.audit.search(context_id=context_id, kind=kind), count))
    yield seen[::-1]
    shown = {(record.chain, record.seq): record.result for record in seen}
    began = latest = max((record.at for record in seen), default=datetime.now(UTC))
    while follow:
        time.sleep(_POLL_S)
        # Ask for a few seconds again: clocks of servers differ, and operations that ran may have ended.
        recent = list(client.audit.search(context_id=context_id, kind=kind, since=latest - _OVERLAP))
        fresh = [record for record in recent if record.at > began or (record.chain, record.seq) in shown]
        yield [each for each in fresh[::-1] if shown.get((each.chain, each.seq), "") != each.result]
        shown = {(record.chain, record.seq): record.result for record in fresh}
        latest = max([latest, *(record.at for record in recent)])


@app.command("search")
def search(
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help="Text in the arguments of the operation.")] = None,
    context: Context = None,
    actor: Annotated[str | None, typer.Option(help="Who did it, such as agent:coder.")] = None,
    kind: Annotated[Kind | None, typer.Option(help="shell, file, network, mcp or session.")] = None,
    name: Annotated[str | None, typer.Option(help="The name of the operation, such as run_command.")] = None,
    decision: Annotated[Decision | None, typer.Option(help="allow, deny or ask.")] = None,
    result: Annotated[str | None, typer.Option(help="ok, or an error code such as denied.")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="How long ago (2h, 3d) or 2030-01-31T12:00.")
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="The same forms as --since.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Print at most this many.")] = 100,
    json: options.Json = False,
) -> None:
    """Find operations, newest first.

    \b
    carrel audit search --decision deny --since 2d
    carrel audit search "git push" --context conversation-42
    """
    with connected() as client:
        found = client.audit.search(
            context_id=context,
            actor=actor,
            kind=kind,
            name=name,
            decision=decision,
            result=result,
            since=_moment(since, "--since"),
            until=_moment(until, "--until"),
            text=text,
        )
        _show(list(islice(found, limit)), json)


@app.command("export")
def export(
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="File to write; - is stdout; *.zst is compressed.")
    ] = "audit.jsonl",
    context: Context = None,
) -> None:
    """Export the log to a signed file that can be verified anywhere.

    \b
    carrel audit export -o audit.jsonl.zst
    carrel audit export --context conversation-42 -o - | carrel audit verify -
    """
    from carrel.client._sync.files import save_as

    with connected() as client:
        pieces = client.audit.export(context_id=context, compress=output.endswith(".zst"))
        if output == "-":
            for piece in pieces:
                sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
            return
        with copying(output) as advance:
            save_as(pieces, Path(output), 0o666, advance)
    note(f"wrote {output}")


@app.command("verify")
def verify(
    file: Annotated[str, typer.Argument(metavar="FILE", help="An exported file, compressed or not; - is stdin.")],
    key: Annotated[
        list[str] | None, typer.Option("--key", help="Trust only this public key (repeatable); see `carrel audit key`.")
    ] = None,
    earlier: Annotated[
        str | None, typer.Option("--earlier", metavar="FILE", help="An older export that this one must continue.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Check that no record of an export was changed, added, removed or moved, and that it is signed. Needs no server.

    If a record is broken, it prints the first one and exits with 1.

    \b
    carrel audit verify audit.jsonl
    carrel audit verify audit.jsonl --earlier last-week.jsonl.zst
    """
    from carrel.audit import public_key

    keys = [public_key(each) for each in key or []]
    before = None if earlier is None else _verified(earlier, keys)
    if before is not None and before.broken is not None:
        print_error(f"{earlier}: {before.broken}")
        raise typer.Exit(1)
    verdict = _verified(file, keys, before)
    if json:
        broken = verdict.broken
        counts = {name: getattr(verdict, name) for name in ("chains", "records", "heads", "unsigned", "open", "pruned")}
        said = None if broken is None else {"line": broken.line, "chain": broken.chain, "seq": broken.seq}
        print_json({"ok": verdict.ok, **counts, "keys": verdict.keys, "broken": said and {**said, "why": broken.why}})  # type: ignore[union-attr]
    elif verdict.broken is not None:
        print_error(f"{file} is broken: {verdict.broken}", "the records before it are unchanged")
    else:
        _print_verdict(verdict, trusted=bool(keys))
    raise typer.Exit(0 if verdict.ok else 1)


@app.command("prune")
def prune(json: options.Json = False) -> None:
    """Remove records older than the setting `audit.keep_days`. The server does so by itself every day.

    \b
    carrel audit prune
    """
    with connected() as client:
        done = client.audit.prune()
    if json:
        print_json(done)
    else:
        note(f"removed {done.records} records from before {done.before:%Y-%m-%d %H:%M} UTC")


@app.command("key")
def key(json: options.Json = False) -> None:
    """Show the public key that signs the log. Store it where you verify exports.

    \b
    carrel audit key
    """
    with connected() as client:
        found = client.audit.key()
    if json:
        print_json(found)
    else:
        print(found.key)


def _verified(file: str, keys: list[str], before: Verification | None = None) -> Verification:
    from carrel.audit import verify

    tips = None if before is None else before.tips
    if file == "-":
        return verify(sys.stdin.buffer, keys=keys, tips=tips)
    try:
        with Path(file).open("rb") as source:
            return verify(source, keys=keys, tips=tips)
    except OSError as error:
        raise InvalidRequest(f"cannot read {file}: {error.strerror}", field="FILE") from None


def _print_verdict(verdict: Verification, *, trusted: bool) -> None:
    print(f"ok: {verdict.records} records in {verdict.chains} chains, {verdict.heads} signed heads")
    if verdict.unsigned:
        note(f"{verdict.unsigned} records came after the last signed head of their chain: only the export covers them")
    if verdict.open:
        note(f"{verdict.open} operations have no end: they ran during the export, or their server was killed")
    if verdict.pruned:
        note(f"{verdict.pruned} chains were pruned: they start at a signed head")
    if not trusted:
        for each in verdict.keys:
            note(f"signed by {plain(each)}: compare it with `carrel audit key`, or give it as --key")


def show_json(records: Sequence[AuditRecord], *, follow: bool) -> None:
    """Print records as one JSON list, or with `follow` as one object per line."""
    if not follow:
        print_json(records)
        return
    for record in records:
        print_line(record)


def _show(records: list[AuditRecord], json: bool, *, follow: bool = False) -> None:
    if json:
        show_json(records, follow=follow)
        return
    if not records:
        return
    colours = {"allow": "green", "deny": "red", "ask": "yellow"}
    rows: list[list[str | Text]] = [
        [
            f"{record.at.astimezone():%Y-%m-%d %H:%M:%S}",
            record.context_id or record.chain,
            record.actor,
            f"{record.kind} {record.name}",
            coloured(record.decision, colours[record.decision]),
            record.result or "…",
            "" if record.duration_ms is None else f"{record.duration_ms:.0f}ms",
            _arguments(record),
        ]
        for record in records
    ]
    print_table(["TIME", "CONTEXT", "ACTOR", "OPERATION", "DECISION", "RESULT", "TOOK", "ARGUMENTS"], rows)


def _arguments(record: AuditRecord) -> str:
    """Return the most telling argument, else all of them, shortened."""
    import json

    values = record.arguments
    for name in ("command", "path", "host", "tool"):
        if isinstance(value := values.get(name), str):
            break
    else:
        value = json.dumps(values, ensure_ascii=False) if values else ""
    return value if len(value) <= _WIDTH else f"{value[: _WIDTH - 1]}…"


def _moment(text: str | None, option: str) -> datetime | None:
    """Parse a date and time, or how long ago."""
    if text is None:
        return None
    if ago := re.fullmatch(r"(\d{1,6})([smhd])", text.strip()):
        return datetime.now(UTC) - timedelta(seconds=int(ago[1]) * _UNITS[ago[2]])
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise typer.BadParameter(
            f"'{text}' is not a time such as 2h, 3d or 2030-01-31T12:00", param_hint=option
        ) from None
    return moment.astimezone(UTC)
