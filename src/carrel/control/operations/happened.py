"""The event of an operation, made from its audit record. Pure.

The audit log knows every operation, so this is the one place that says which of them are events. Outbound connections
are too many: `control/egress/connection_events.py` sums them up.
"""

from __future__ import annotations

from carrel.audit.records import AuditEntry, Ending, Type, context_of
from carrel.errors import ApprovalNeeded
from carrel.models import CellResult, CommandInfo, CommandResult, ExecuteResult
from carrel.models.events import EventDraft, EventKind, body_of
from carrel.models.operations import TABLE

_ROWS = {(str(row.kind), row.name): row for row in TABLE if row.event is not None}
_ARGUMENTS = ("command", "path", "destination", "server", "tool", "snapshot_id", "context", "code")
_ASKED = ApprovalNeeded.code

LATER = {"later": True}
"""What an operation tells if its event is written later: by `CommandEnds`, when what it has started is over."""


def event_of(
    node: str, type: Type, entry: AuditEntry, ending: Ending | None, operation: int | None, at: float
) -> EventDraft | None:
    """Return the event that is written with an audit record."""
    if entry.kind == "network":
        return None
    values: dict[str, object] = {"operation": entry.name, "record": operation, "actor": entry.actor}
    row = _ROWS.get((entry.kind, entry.name))
    kind: EventKind | None
    if type == "whole":
        if ending is None or ending.result in {"ok", _ASKED}:
            return None
        kind = EventKind.OPERATION_REFUSED
        values |= {"reason": ending.reason, "rule": entry.rule, "approval": entry.approval} | _arguments(entry)
    elif row is None:
        return None
    elif type == "begin":
        kind = row.starts
        values |= {"approval": entry.approval} | _arguments(entry)
    else:
        kind = row.event
        assert ending is not None
        if ending.told == LATER or (row.starts is None and ending.result != "ok"):
            return None
        values |= _ended(ending) if row.starts is not None else {**_arguments(entry), **ending.told}
    if kind is None:
        return None
    return EventDraft(at, kind.value, context_of(entry.chain), entry.sandbox, node, body_of(values))


def _arguments(entry: AuditEntry) -> dict[str, object]:
    return {name: entry.arguments[name] for name in _ARGUMENTS if name in entry.arguments}


def _ended(ending: Ending) -> dict[str, object]:
    values: dict[str, object] = {
        "duration_ms": None if ending.duration_ms is None else round(ending.duration_ms, 3),
        "bytes_in": ending.bytes_in,
        "bytes_out": ending.bytes_out,
    }
    if ending.result == "ok":
        return {"exit": "ok", **ending.told, **values}
    exit = ending.result if ending.result in {"unknown", "cancelled"} else "error"
    return {"exit": exit, "error": ending.result if exit == "error" else None, **values}


def told_of(result: CommandInfo | CommandResult | CellResult | ExecuteResult) -> dict[str, object]:
    """Return how a command, a Python call or a cell ended. Its output is read with `command_id`."""
    if result.oom_killed:
        exit = "out_of_memory"
    elif result.timed_out:
        exit = "timed_out"
    elif result.signal is not None:
        exit = "signaled"
    else:
        failed = result.status != "ok" if isinstance(result, CellResult) else result.exit_code != 0
        exit = "failed" if failed else "ok"
    told: dict[str, object] = {"exit": exit, "exit_code": result.exit_code, "signal": result.signal}
    if isinstance(result, CellResult):
        told["cell_id"] = result.id
    elif not isinstance(result, ExecuteResult):
        told["command_id"] = result.id
    return told
