"""The event log as server-sent events, and log records of programs."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from carrel.api.guard import GuardedRouter, require
from carrel.api.parts import SSE, ClosingStream, as_json, caller_of, json_of, plane_of, query_of
from carrel.control.plane import ControlPlane
from carrel.errors import InvalidRequest
from carrel.events import Page
from carrel.identity import Identity
from carrel.models import ContextId, JobId, LogReceipt, LogRecords
from carrel.models.events import TRUNCATED, EventFilter, StoredEvent, kinds_of
from carrel.models.operations import PUBLISH_LOG, STREAM_CONTEXT, STREAM_EVENTS

router = GuardedRouter(tags=["events"])

BEAT_S = 10.0
_MOST_ID = 2**63 - 1
_STREAM = {
    "description": "Server-sent events. `data` is an `EventInfo`, `event` its kind, `id` its number. `truncated` "
    "stands for events that were removed",
    "content": {SSE: {"schema": {"$ref": "#/components/schemas/EventInfo"}}},
}


class StreamQuery(BaseModel):
    """The query of the stream of a session or context."""

    model_config = ConfigDict(defer_build=True)

    kind: str | None = Field(
        default=None, max_length=512, description="only these kinds or families, separated by commas"
    )
    after: int | None = Field(
        default=None,
        ge=0,
        le=_MOST_ID,
        description="events after this id, 0 for all; by default only new ones. The header `Last-Event-ID` replaces it",
    )
    follow: bool = Field(default=True, description="go on with new events; else end with the newest")


class EventsQuery(StreamQuery):
    """The query of the stream of all events."""

    context_id: ContextId | None = Field(default=None, description="only of this context")
    job: JobId | None = Field(default=None, description="only of this job")


@router.operation(STREAM_EVENTS, "Follow events", _STREAM, queries=EventsQuery)
async def stream_events(request: Request) -> Response:
    """Of every context that the token may access, or of one. A comment comes every 10 seconds."""
    asked = query_of(request, EventsQuery)
    identity = caller_of(request).identity
    if asked.context_id is not None:
        require(caller_of(request), STREAM_EVENTS, asked.context_id)
    return await _stream(request, asked, _within(identity, EventFilter(context_id=asked.context_id, job_id=asked.job)))


@router.operation(STREAM_CONTEXT, "Follow the events of a session, context or job", _STREAM, 404, queries=StreamQuery)
async def stream_context(request: Request) -> Response:
    """By the id of the session or of the job, or by the context for all its sessions."""
    asked, name = query_of(request, StreamQuery), request.path_params["id"]
    if await plane_of(request).jobs.context_of(name) is not None:
        return await _stream(request, asked, EventFilter(job_id=name))
    record = await plane_of(request).sessions.record(name)
    by_session = name == record.id
    wanted = EventFilter(record.context_id, record.id if by_session or record.context_id is None else None)
    return await _stream(request, asked, wanted)


@router.operation(PUBLISH_LOG, "Send log records", LogReceipt, 413, 429, parses=LogRecords)
async def publish_log(request: Request) -> Response:
    """They become events of the kind `log`, without the secrets of the context."""
    records, caller = await json_of(request, LogRecords), caller_of(request)
    require(caller, PUBLISH_LOG, records.context_id)
    return as_json(LogReceipt(stored=await plane_of(request).log_records.publish(caller, records)))


def _within(identity: Identity, wanted: EventFilter) -> EventFilter:
    """Restrict a filter to what a token may access."""
    return replace(wanted, contexts=identity.contexts, namespace=identity.namespace)


async def _stream(request: Request, asked: StreamQuery, wanted: EventFilter) -> Response:
    kinds = kinds_of([] if asked.kind is None else asked.kind.split(","))
    wanted = replace(wanted, kinds=kinds)
    after = asked.after
    if (said := request.headers.get("last-event-id")) is not None:
        if not said.isdecimal() or int(said[:20]) > _MOST_ID:
            raise InvalidRequest("this is not the id of an event", field="Last-Event-ID", hint="send the last id")
        after = int(said[:20])
    pieces = _pieces(plane_of(request), wanted, after, follow=asked.follow)
    return ClosingStream(pieces, media_type=SSE, headers={"cache-control": "no-store", "x-accel-buffering": "no"})


async def _pieces(plane: ControlPlane, wanted: EventFilter, after: int | None, *, follow: bool) -> AsyncIterator[bytes]:
    until = None if follow else await plane.events.last()
    async with aclosing(plane.events.follow(wanted, after, beat_s=BEAT_S, until=until)) as pages:
        async for page in pages:
            yield _encoded(page)


def _encoded(page: Page) -> bytes:
    """Return a page as server-sent events. Its last line moves the reader's position past what was not for it."""
    if page.missing is not None:
        shown = {"id": page.missing, "at": _moment(time.time()), "kind": TRUNCATED}
        return f"id: {page.missing}\nevent: {TRUNCATED}\ndata: {json.dumps(shown)}\n\n".encode()
    if not page.events:
        return b": still here\nid: %d\n\n" % page.position
    return b"".join(map(_event, page.events))


@lru_cache(maxsize=4096)
def _event(event: StoredEvent) -> bytes:
    """Return one event. All its readers get the same bytes."""
    facts = {"id": event.id, "at": _moment(event.at), "kind": event.kind}
    named = {"context_id": event.context_id, "session_id": event.session_id, "job_id": event.job_id, "node": event.node}
    shown = json.dumps({**facts, **{name: value for name, value in named.items() if value}})
    return f'id: {event.id}\nevent: {event.kind}\ndata: {shown[:-1]}, "body": {event.body}}}\n\n'.encode()


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()
