"""Delivers the event log to NATS JetStream, in order and without loss or repetition, as far behind as NATS needs.

The log is the truth: nothing waits for NATS. What the stream has is read from the stream itself, and each message says
after which one it has to come (`Nats-Expected-Last-Sequence`), so a message that was lost on the way is never skipped.
Subjects are `events.agent.<id>` and `logs.agent.<id>`; `cmd.agent.<id>` is reserved for jobs and not used yet.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from carrel.errors import CarrelError, Conflict, PlatformError
from carrel.events.log import EventLog
from carrel.extras import using
from carrel.models.events import EVERYTHING, EventKind, StoredEvent
from carrel.primitives import tasks
from carrel.primitives.backoff import Backoff

if TYPE_CHECKING:
    from nats.aio.client import Client as NatsClient
    from nats.js import JetStreamContext

log = logging.getLogger("carrel.events")

STREAM = "CARREL"
SUBJECTS = ("events.agent.>", "logs.agent.>")
BUS = "nats"
_LEASE_S = 15.0
_RECORD_EVERY_S = 0.25
_AT_ONCE = 100
_ANSWER_S = 10.0
_CONNECT_S = 5.0
_OF_SERVER = "_"
"""Stands for the id in the subject of an event that has neither a context nor a session."""


class Deliveries(Protocol):
    """The methods of a store that the bus needs; `store.events.EventStore` has and explains them."""

    async def identity(self) -> int:
        """Return the number of this log."""

    async def delivered(self, bus: str) -> int:
        """Return the newest id that a bus has."""

    async def deliver(self, bus: str, owner: str, seconds: float) -> bool:
        """Become, or stay, the server that delivers."""

    async def set_delivered(self, bus: str, position: int, owner: str) -> bool:
        """Record what a bus has."""

    async def stop_delivering(self, bus: str, owner: str) -> None:
        """Let another server deliver."""


def subject_of(event: StoredEvent) -> str:
    """Return the subject of an event. A dot in an id would separate it, so it is written as `%2E`."""
    room = "logs" if event.kind == EventKind.LOG else "events"
    name = event.context_id or event.session_id or _OF_SERVER
    return f"{room}.agent.{name.replace('.', '%2E')}"


def payload_of(event: StoredEvent) -> bytes:
    """Return an event as JSON."""
    facts = {"id": event.id, "at": event.at, "kind": event.kind}
    named = {"context_id": event.context_id, "session_id": event.session_id, "job_id": event.job_id, "node": event.node}
    shown = json.dumps({**facts, **{name: value for name, value in named.items() if value}})
    return f'{shown[:-1]}, "body": {event.body}}}'.encode()


class NatsBus:
    """One server's delivery. Of several servers on one database one delivers; another goes on when it is gone."""

    def __init__(self, url: str, events: EventLog, deliveries: Deliveries, node: str, *, keep_s: float):
        with using("nats"):
            import nats.js  # noqa: F401
        self._url = url
        parts = urlsplit(url)
        self._place = f"NATS on {parts.hostname or 'an unknown host'}:{parts.port or 4222}"
        self._events = events
        self._deliveries = deliveries
        self._node = node
        self._keep_s = keep_s
        self._log = 0
        self._said = ""
        self._task: asyncio.Task[None] | None = None
        self.behind = 0
        """Events that the stream lacked when this server looked last; 0 if another server delivers."""

    def start(self) -> None:
        """Start to deliver."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop. What is not delivered yet is delivered after the next start."""
        await tasks.cancel([self._task])
        with suppress(CarrelError):
            await self._deliveries.stop_delivering(BUS, self._node)

    async def delivered(self) -> int:
        """Return the newest id that the stream has."""
        return await self._deliveries.delivered(BUS)

    async def _run(self) -> None:
        backoff = Backoff(0.1, 5.0)
        while True:
            try:
                if await self._deliveries.deliver(BUS, self._node, _LEASE_S):
                    await self._deliver(backoff)
                self.behind = 0
                await asyncio.sleep(_LEASE_S / 3)
            except Exception as error:
                words = f"events cannot be delivered to {self._place}: {str(error) or type(error).__name__}"
                if words != self._said:
                    log.warning("%s; they stay in the event log until they can", words)
                    self._said = words
                with suppress(CarrelError):
                    self.behind = await self._events.last() - await self.delivered()
                await asyncio.sleep(backoff.next_pause())

    async def _deliver(self, backoff: Backoff) -> None:
        """Deliver until something fails, the server ends, or another server delivers."""
        import nats

        said: list[Exception] = []

        async def keep(error: Exception) -> None:
            said[:] = [error]

        try:
            client = await nats.connect(
                self._url,
                name=f"carrel {self._node}",
                allow_reconnect=False,
                max_reconnect_attempts=1,  # else it would try for two minutes, and say nothing
                reconnect_time_wait=0.1,
                connect_timeout=_CONNECT_S,
                error_cb=keep,
            )
        except nats.errors.NoServersError:
            raise (said[0] if said else PlatformError("it does not answer")) from None
        try:
            stream = client.jetstream(timeout=_ANSWER_S)
            position, sequence = await self._begin(stream)
            log.info("events after %d are delivered to %s", position, self._place)
            backoff.reset()
            self._said = ""
            await self._publish_from(client, stream, position, sequence)
        finally:
            with suppress(Exception):
                await client.close()

    async def _publish_from(self, client: NatsClient, stream: JetStreamContext, position: int, sequence: int) -> None:
        loop = asyncio.get_running_loop()
        recorded, leased = 0.0, loop.time()
        pages = self._events.follow(EVERYTHING, position, beat_s=_RECORD_EVERY_S)
        async with aclosing(pages):
            async for page in pages:
                for start in range(0, len(page.events), _AT_ONCE):
                    sequence = await self._publish(stream, page.events[start : start + _AT_ONCE], sequence)
                self.behind = max(0, await self._events.last() - page.position) if page.events else 0
                if client.is_closed:
                    raise PlatformError("the connection broke")
                now = loop.time()
                if page.position > position and now - recorded > _RECORD_EVERY_S:
                    position, recorded = page.position, now
                    if not await self._deliveries.set_delivered(BUS, position, self._node):
                        return
                if now - leased > _LEASE_S / 3:
                    leased = now
                    if not await self._deliveries.deliver(BUS, self._node, _LEASE_S):
                        return

    async def _publish(self, stream: JetStreamContext, events: Sequence[StoredEvent], sequence: int) -> int:
        """Publish events after the message with this sequence, and return that of the last one."""
        sent = [
            stream.publish(
                subject_of(event),
                payload_of(event),
                timeout=_ANSWER_S,
                stream=STREAM,
                headers={
                    "Nats-Msg-Id": f"{self._log:x}-{event.id}",
                    "Nats-Expected-Last-Sequence": str(sequence + number),
                },
            )
            for number, event in enumerate(events)
        ]
        failed = [each for each in await asyncio.gather(*sent, return_exceptions=True) if isinstance(each, Exception)]
        if failed:
            raise failed[0]
        return sequence + len(events)

    async def _begin(self, stream: JetStreamContext) -> tuple[int, int]:
        """Make the stream if there is none. Return the newest event that it has, and its last sequence."""
        from nats.js.errors import NotFoundError

        self._log = await self._deliveries.identity()
        try:
            info = await stream.stream_info(STREAM)
        except NotFoundError:
            info = await stream.add_stream(
                name=STREAM, subjects=list(SUBJECTS), max_age=self._keep_s, duplicate_window=min(120.0, self._keep_s)
            )
        if missing := set(SUBJECTS) - set(info.config.subjects or ()):
            raise Conflict(
                f"its stream '{STREAM}' lacks the subjects {', '.join(sorted(missing))}",
                hint="add them to the stream, or remove it so that carrel makes it",
            )
        last = info.state.last_seq
        if last == 0:
            return 0, 0
        try:
            found: Any = await stream.get_msg(STREAM, seq=last)
        except NotFoundError:  # the stream has removed its messages
            return await self.delivered(), last
        log_id, _, event_id = (found.headers or {}).get("Nats-Msg-Id", "").partition("-")
        if log_id == f"{self._log:x}" and event_id.isdecimal():
            return int(event_id), last
        return await self.delivered(), last
