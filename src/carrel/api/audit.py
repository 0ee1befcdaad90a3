"""The audit log: search, export, public key, removal of old records."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from starlette.responses import Response

from carrel.api.guard import GuardedRouter, require
from carrel.api.parameters import Query
from carrel.api.parts import NDJSON, ClosingStream, Plane, Who, as_json
from carrel.audit import Filter, chain_of
from carrel.models import AuditKey, AuditPage, AuditPruned, Moment
from carrel.models.operations import EXPORT_AUDIT, GET_AUDIT_KEY, PRUNE_AUDIT, SEARCH_AUDIT, Kind

router = GuardedRouter(tags=["audit"])

ZSTD = "application/zstd"
Context = Annotated[
    str | None, Query(max_length=128, description="only of this context; required for a token that does not reach all")
]
_FILE = {"schema": {"type": "string", "format": "binary"}}


def _moment(given: datetime | None) -> float | None:
    if given is None:
        return None
    return (given if given.tzinfo is not None else given.replace(tzinfo=UTC)).timestamp()


@router.operation(SEARCH_AUDIT, "Find operations", AuditPage)
async def search_audit(
    plane: Plane,
    caller: Who,
    *,
    context_id: Context = None,
    actor: Annotated[str | None, Query(max_length=200)] = None,
    kind: Kind | None = None,
    name: Annotated[str | None, Query(max_length=128, description="the operation, such as run_command")] = None,
    decision: Literal["allow", "deny", "ask"] | None = None,
    result: Annotated[str | None, Query(max_length=128, description="`ok`, or the code of an error")] = None,
    since: Moment | None = None,
    until: Moment | None = None,
    text: Annotated[str | None, Query(min_length=1, max_length=200, description="in the arguments")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(max_length=512, description="`next` of the page before")] = None,
) -> Response:
    """Newest first. A page may be short or empty and still have a `next`."""
    require(caller, SEARCH_AUDIT, context_id)
    await plane.audit.flush()  # so that a caller finds its last operation
    wanted = Filter(
        None if context_id is None else chain_of(context_id),
        actor,
        kind,
        name,
        decision,
        result,
        _moment(since),
        _moment(until),
        text,
    )
    return as_json(await plane.audit.search(wanted, limit=limit, cursor=cursor))


@router.operation(
    EXPORT_AUDIT,
    "Export the log",
    {"description": "A file that `carrel audit verify` checks", "content": {NDJSON: _FILE, ZSTD: _FILE}},
)
async def export_audit(
    plane: Plane,
    caller: Who,
    context_id: Context = None,
    compress: Annotated[bool, Query(description="with zstd")] = False,
) -> Response:
    """Every chain, or the chain of one context, signed up to its end."""
    require(caller, EXPORT_AUDIT, context_id)
    pieces = plane.audit.export(None if context_id is None else [chain_of(context_id)], compress=compress)
    return ClosingStream(pieces, media_type=ZSTD if compress else NDJSON, headers={"cache-control": "no-store"})


@router.operation(GET_AUDIT_KEY, "The key that signs the log", AuditKey)
async def get_audit_key(plane: Plane) -> Response:
    """The public key of this server's log."""
    return as_json(AuditKey(node=plane.audit.node, key=plane.audit.key.public))


@router.operation(PRUNE_AUDIT, "Remove old records", AuditPruned, 409)
async def prune_audit(plane: Plane, caller: Who) -> Response:
    """Now, and only those that the server would remove itself: records older than its `audit.keep_days`."""
    return as_json(await plane.upkeep.prune_audit(caller.identity.subject))
