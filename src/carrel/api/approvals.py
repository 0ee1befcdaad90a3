"""Approvals: list, watch and decide operations that wait for a person."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from starlette.requests import Request
from starlette.responses import Response

from carrel.api.guard import GuardedRouter, require
from carrel.api.parameters import Path, Query
from carrel.api.parts import NDJSON, SSE, ClosingStream, Plane, Who, as_json, caller_of, plane_of, wants_sse
from carrel.identity import Identity
from carrel.models import (
    ApprovalBatch,
    ApprovalBatchResult,
    ApprovalDecision,
    ApprovalInfo,
    ApprovalPage,
    ApprovalState,
)
from carrel.models.operations import DECIDE_APPROVAL, DECIDE_APPROVALS, GET_APPROVAL, LIST_APPROVALS, WATCH_APPROVALS

router = GuardedRouter(tags=["approvals"])

ApprovalId = Annotated[str, Path(min_length=1, max_length=64, description="id of an approval")]
_EVENT = {"schema": {"$ref": "#/components/schemas/ApprovalInfo"}}


@router.operation(LIST_APPROVALS, "List approvals", ApprovalPage)
async def list_approvals(
    plane: Plane,
    caller: Who,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(max_length=512, description="`next` of the page before")] = None,
    state: Annotated[ApprovalState | None, Query(description="only in this state")] = None,
    context_id: Annotated[str | None, Query(max_length=128)] = None,
) -> Response:
    """Newest first, within the reach of the token: a page may be short or empty and still have a `next`."""
    states = None if state is None else [state]
    page = await plane.approvals.page(limit=limit, cursor=cursor, states=states, context_id=context_id)
    page.items = [info for info in page.items if caller.identity.reaches(info.context_id)]
    return as_json(page)


@router.operation(
    WATCH_APPROVALS,
    "Watch approvals",
    {
        "description": "An `ApprovalInfo` per line, or per server-sent event if asked for",
        "content": {NDJSON: _EVENT, SSE: _EVENT},
    },
)
async def watch_approvals(request: Request) -> Response:
    """First those that are pending, then each one that is created, decided or expires, until the caller disconnects."""
    sse = wants_sse(request)
    events = _events(plane_of(request).approvals.watch(), caller_of(request).identity, sse)
    return ClosingStream(events, media_type=SSE if sse else NDJSON, headers={"cache-control": "no-store"})


async def _events(watched: AsyncIterator[ApprovalInfo], identity: Identity, sse: bool) -> AsyncIterator[bytes]:
    before, after = (b"data: ", b"\n\n") if sse else (b"", b"\n")
    try:
        async for info in watched:
            if identity.reaches(info.context_id):
                yield before + info.model_dump_json().encode() + after
    finally:
        await watched.aclose()  # type: ignore[attr-defined]


@router.operation(DECIDE_APPROVALS, "Decide several approvals", ApprovalBatchResult, 413)
async def decide_approvals(body: ApprovalBatch, plane: Plane, caller: Who) -> Response:
    """The same decision for each; one that cannot be decided does not stop the others."""
    return as_json(await plane.decisions.decide_all(caller, body))


@router.operation(GET_APPROVAL, "One approval", ApprovalInfo, 404)
async def get_approval(approval_id: ApprovalId, plane: Plane, caller: Who) -> Response:
    """With the decision, if there is one."""
    info = await plane.approvals.get(approval_id)
    require(caller, GET_APPROVAL, info.context_id)
    return as_json(info)


@router.operation(DECIDE_APPROVAL, "Approve or deny", ApprovalInfo, 404, 409, 413)
async def decide_approval(approval_id: ApprovalId, body: ApprovalDecision, plane: Plane, caller: Who) -> Response:
    """Once, or always for this operation in its context, or with a rule for the context. Nobody can approve their own
    request.
    """
    return as_json(await plane.decisions.decide(caller, approval_id, body))
