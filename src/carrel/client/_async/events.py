"""The stream of events: reads server-sent events, and connects again where it was."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing

from pydantic import ValidationError

from carrel.client._async.connection import AsyncConnection
from carrel.client._io_async import pause
from carrel.errors import CarrelError, PlatformError
from carrel.models import EventInfo
from carrel.primitives.backoff import Backoff

_SILENCE_S = 10.0
"""The server says something at least this often; the usual grace is added."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
_LONGEST_LINE = 1024 * 1024


async def follow_events(
    connection: AsyncConnection,
    context: str | None,
    kinds: Iterable[str] | None,
    after: int | None,
    *,
    follow: bool,
    job: str | None = None,
) -> AsyncIterator[EventInfo]:
    """Yield events. The first connection must succeed; a later failure is repaired, unless the server refuses."""
    kind = None if kinds is None else ",".join([kinds] if isinstance(kinds, str) else kinds)
    position, connected, backoff = after, False, Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
    while True:
        query = {"context_id": context, "job": job, "kind": kind, "after": position}
        query["follow"] = None if follow else "false"
        try:
            async with aclosing(_messages(connection, query)) as messages:
                async for id, event in messages:
                    connected = True
                    backoff.reset()
                    if event is not None and (position is None or id > position or event.kind == "truncated"):
                        position = id
                        yield event
                    position = id
            if not follow:
                return
        except CarrelError as error:
            if not connected or (error.status < 500 and error.status != 429):
                raise
        await pause(backoff.next_pause())


async def _messages(
    connection: AsyncConnection, query: dict[str, str | int | None]
) -> AsyncGenerator[tuple[int, EventInfo | None], None]:
    """Yield the position after each message, and its event if it has one."""
    id, data, held = 0, b"", b""
    async with aclosing(connection.pieces("/v1/events", query, deadline=_SILENCE_S)) as arriving:
        async for piece in arriving:
            *lines, held = (held + piece).split(b"\n")
            if len(held) > _LONGEST_LINE:
                raise PlatformError("the server sent an event that is too long")
            for line in lines:
                if line.startswith(b"id: ") and line[4:].isdigit():
                    id = int(line[4:])
                elif line.startswith(b"data: "):
                    data = line[6:]
                elif not line:
                    yield id, _event(data) if data else None
                    data = b""


def _event(data: bytes) -> EventInfo:
    try:
        return EventInfo.model_validate_json(data)
    except ValidationError:
        raise PlatformError("the server sent an event that cannot be read") from None
