"""`egress`: outbound connections of sandboxes, allowed and denied."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from carrel.cli import options
from carrel.cli.audit import Context, Count, Follow, newest, show_json
from carrel.cli.connecting import connected
from carrel.cli.printing import coloured, print_table, size

if TYPE_CHECKING:
    from rich.text import Text

    from carrel.models import AuditRecord

app = typer.Typer(help="Outbound connections of sandboxes.", no_args_is_help=True, add_completion=False)

_COLUMNS = ["TIME", "CONTEXT", "HOST", "DECISION", "RESULT", "IN", "OUT", "TOOK", "ADDRESS", "REQUEST", "RULE"]
_WIDTH = 40


@app.callback()
def _egress() -> None:
    """Outbound connections of sandboxes."""


@app.command("tail")
def tail(context: Context = None, count: Count = 20, follow: Follow = False, json: options.Json = False) -> None:
    """Show the latest outbound connections, allowed and denied, the newest at the end.

    \b
    carrel egress tail
    carrel egress tail -f --context conversation-42
    """
    with connected() as client:
        for records in newest(client, count, follow=follow, context_id=context, kind="network"):
            if json:
                show_json(records, follow=follow)
            elif records:
                _show(records)


def _show(records: list[AuditRecord]) -> None:
    colours = {"allow": "green", "deny": "red", "ask": "yellow"}
    rows: list[list[str | Text]] = []
    for record in records:
        asked = record.arguments
        host, port = asked.get("host"), asked.get("port")
        request = " ".join(str(asked[name]) for name in ("method", "path") if asked.get(name))
        rows.append(
            [
                f"{record.at.astimezone():%m-%d %H:%M:%S}",
                record.context_id or record.chain,
                "packages" if host is None else f"{host}:{port}",
                coloured(record.decision, colours[record.decision]),
                record.result or "…",
                "" if record.bytes_in is None else size(record.bytes_in),
                "" if record.bytes_out is None else size(record.bytes_out),
                "" if record.duration_ms is None else f"{record.duration_ms:.0f}ms",
                str(asked.get("address") or asked.get("upstream") or ""),
                _short(request or str(asked.get("protocol", ""))),
                _short(record.rule or record.approval or ""),
            ]
        )
    print_table(_COLUMNS, rows)


def _short(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"
