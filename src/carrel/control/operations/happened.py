"""The event of an operation, made from its audit record. Pure.

The audit log knows every operation, so this is the one place that says which of them are events. Outbound connections
are too many: `control/egress/connection_events.py` sums them up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from carrel.audit.log import UNKNOWN
from carrel.audit.records import AuditEntry, Ending, Type, context_of
from carrel.errors import ApprovalNeeded
from carrel.models import CellResult, CommandInfo, CommandResult, ExecuteResult
from carrel.models.events import EventDraft, EventKind, body_of
from carrel.models.operations import TABLE, Operation

_ROWS = {(str(row.kind), row.name): row for row in TABLE if row.event is not None}
_ARGUMENTS = ("port", "public", "command", "path", "destination", "server", "tool", "snapshot_id", "context", "code")
_ASKED = ApprovalNeeded.code

ENDS = {
    EventKind.COMMAND_STARTED: EventKind.COMMAND_ENDED,
    EventKind.PYTHON_STARTED: EventKind.PYTHON_ENDED,
}
"""What ends in the background, after the operation that started it."""
LATER = {"later": True}
"""What an operation tells if its event is written later: by `CommandEnds`, when what it has started is over."""


def events_of(
    node: str, type: Type, entry: AuditEntry, ending: Ending | None, operation: int | None, at: float
) -> Sequence[EventDraft]:
    """Return the events that are written with an audit record: nearly always one or none."""
    if entry.kind == "network":
        return ()
    row = _ROWS.get((entry.kind, entry.name))
    happened: list[tuple[EventKind, Mapping[str, object]]] = []
    if type == "whole":
        if ending is not None and ending.result not in {"ok", _ASKED}:
            why = {"reason": ending.reason, "rule": entry.rule, "approval": entry.approval}
            happened.append((EventKind.OPERATION_REFUSED, why | _arguments(entry)))
    elif row is None or row.event is None:
        return ()
    elif type == "begin":
        if row.starts is not None:
            happened.append((row.starts, {"approval": entry.approval} | _arguments(entry)))
    elif ending is None or ending.told == LATER:
        return ()
    elif row.starts is not None:
        happened.append((row.event, _ended(ending)))
    elif ending.result == "ok":
        happened.append((row.event, _arguments(entry) | dict(ending.told)))
    elif ending.result == UNKNOWN.result and row.event in ENDS:  # the server was killed: nobody knows the command's id
        happened += [(row.event, _arguments(entry)), (ENDS[row.event], _ended(ending))]
    facts = {"operation": entry.name, "record": operation, "actor": entry.actor}
    context = context_of(entry.chain)
    session = entry.sandbox or (entry.chain.partition(":")[2] if entry.chain.startswith("sandbox:") else None)
    return [
        EventDraft(at, kind.value, context, session, node, body_of({**facts, **values})) for kind, values in happened
    ]


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


def exit_of(operation: Operation, ending: Ending) -> str | None:
    """Return how the command of an operation ended; None if it runs none, or one that goes on in the background."""
    if operation.starts not in ENDS or ending.told == LATER:
        return None
    return str(_ended(ending)["exit"])


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
