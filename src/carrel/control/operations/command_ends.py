"""Writes the event that a command in the background has ended, also after a restart of the server, and counts it.

Its start has passed admission; its end is known only to the supervisor, which is asked to say it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping

from carrel.audit import AuditLog
from carrel.control.operations.happened import ENDS, told_of
from carrel.control.operations.traces import process_span
from carrel.control.sessions.live import LiveSandbox
from carrel.control.supervisor.memory import for_memory
from carrel.errors import CarrelError
from carrel.events import EventLog
from carrel.metrics import Metrics
from carrel.models import CommandInfo
from carrel.models.events import EventDraft, EventFilter, EventKind
from carrel.primitives import tasks

log = logging.getLogger("carrel.events")

_CLOSING_S = 1.0
GATHER_S = 0.05
"""How long the end of a command may wait for others: they share the flush of the audit log."""


class CommandEnds:
    """The commands in the background of one server."""

    def __init__(self, events: EventLog, audit: AuditLog, metrics: Metrics):
        self._events = events
        self._audit = audit
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()
        self._drafts: list[EventDraft] = []
        self._writing: asyncio.Task[None] | None = None

    def watch(
        self, box: LiveSandbox, started: EventKind, what: dict[str, object], end: Callable[[], Awaitable[CommandInfo]]
    ) -> None:
        """Write the event when `end` returns; `what` names the command in it."""
        task = asyncio.get_running_loop().create_task(self._wait(box, ENDS[started], what, end))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def watch_command(
        self,
        box: LiveSandbox,
        started: EventKind,
        command_id: str,
        record: int | None,
        end: Callable[[], Awaitable[CommandInfo]] | None = None,
    ) -> None:
        """Watch a command of the sandbox by its id, unless somebody else does it and `end` returns its end."""
        what: dict[str, object] = {"command_id": command_id, "record": record}
        self.watch(box, started, what, end or (lambda: box.connection.command_end(command_id)))

    async def adopt(self, box: LiveSandbox) -> None:
        """Watch the commands that were started before this server: those whose start is in the log, and no end."""
        record = box.record
        kinds = frozenset({*ENDS, *ENDS.values(), EventKind.SESSION})
        # Without the session: the audit log does not know it when it ends what a killed server left open.
        session_id = record.id if record.context_id is None else None
        wanted = EventFilter(context_id=record.context_id, session_id=session_id, kinds=kinds)
        open_ones: dict[object, tuple[EventKind, Mapping[str, object]]] = {}
        async for page in self._events.follow(wanted, 0, until=await self._events.settled()):
            for event in page.events:
                kind, body = EventKind(event.kind), json.loads(event.body)
                if kind is EventKind.SESSION:  # another sandbox, and the commands of the one before are gone
                    open_ones.clear()
                elif kind in ENDS:
                    open_ones[body.get("record")] = (kind, body)
                else:
                    open_ones.pop(body.get("record"), None)
        for number, (kind, body) in open_ones.items():
            if isinstance(command_id := body.get("command_id"), str):
                self.watch_command(box, kind, command_id, number if isinstance(number, int) else None)
            else:  # a cell: its id is not known any more
                values = {"record": number, "exit": "unknown"}
                self._events.add([self._events.draft(ENDS[kind], record.context_id, record.id, values)])

    async def close(self) -> None:
        """Stop watching, once the ends of commands that ended with their sandboxes are written."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSING_S)
        await tasks.cancel(list(self._tasks))
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=_CLOSING_S)
            await tasks.cancel([self._writing])

    async def _wait(
        self, box: LiveSandbox, kind: EventKind, what: dict[str, object], end: Callable[[], Awaitable[CommandInfo]]
    ) -> None:
        values, seconds = dict(what), 0.0
        try:
            info = await end()
            info.oom_killed = await for_memory(box, info)
            seconds = info.duration_ms / 1000
            process_span(seconds, told_of(info))
            values |= told_of(info) | {"duration_ms": info.duration_ms, "bytes_out": info.output_bytes}
        except CarrelError:  # the sandbox has ended, or forgot the command
            values["exit"] = "gone"
        values |= what
        self._metrics.command_ended(box.record.template, str(values["exit"]), seconds)
        self._drafts.append(self._events.draft(kind, box.record.context_id, box.record.id, values))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write())

    async def _write(self) -> None:
        while self._drafts:
            await asyncio.sleep(GATHER_S)
            drafts, self._drafts = self._drafts, []
            try:
                await self._audit.flush()  # the event of a start comes with a record, and comes first
                self._events.add(drafts)
            except CarrelError as error:
                log.warning("the ends of %d commands are not in the event log: %s", len(drafts), error)
