"""Writes the event that a command in the background has ended, also after a restart of the server.

Its start has passed admission; its end is known only to the supervisor, which is asked to say it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable

from carrel.audit import AuditLog
from carrel.control.operations.happened import told_of
from carrel.control.sessions.live import LiveSandbox
from carrel.control.supervisor.memory import for_memory
from carrel.errors import CarrelError
from carrel.events import EventLog
from carrel.models import CommandInfo
from carrel.models.events import EventFilter, EventKind
from carrel.primitives import tasks

log = logging.getLogger("carrel.events")

ENDS = {
    EventKind.COMMAND_STARTED: EventKind.COMMAND_ENDED,
    EventKind.PYTHON_STARTED: EventKind.PYTHON_ENDED,
}


_CLOSING_S = 1.0


class CommandEnds:
    """The commands in the background of one server."""

    def __init__(self, events: EventLog, audit: AuditLog):
        self._events = events
        self._audit = audit
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(
        self, box: LiveSandbox, started: EventKind, what: dict[str, object], end: Callable[[], Awaitable[CommandInfo]]
    ) -> None:
        """Write the event when `end` returns; `what` names the command in it."""
        task = asyncio.get_running_loop().create_task(self._wait(box, ENDS[started], what, end))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def watch_command(self, box: LiveSandbox, started: EventKind, command_id: str, record: int | None) -> None:
        """Watch a command of the sandbox by its id."""
        what: dict[str, object] = {"command_id": command_id, "record": record}
        self.watch(box, started, what, lambda: box.connection.command_end(command_id))

    async def adopt(self, box: LiveSandbox) -> None:
        """Watch the commands that were started before this server: those whose start is in the log, and no end."""
        record, open_ones = box.record, dict[str, tuple[EventKind, int | None]]()
        kinds = frozenset({*ENDS, *ENDS.values()})
        wanted = EventFilter(context_id=record.context_id, session_id=record.id, kinds=kinds)
        async for page in self._events.follow(wanted, 0, until=await self._events.last()):
            for event in page.events:
                body = json.loads(event.body)
                if (command_id := body.get("command_id")) is None:
                    continue
                if (kind := EventKind(event.kind)) in ENDS:
                    open_ones[command_id] = (kind, body.get("record"))
                else:
                    open_ones.pop(command_id, None)
        for command_id, (kind, number) in open_ones.items():
            self.watch_command(box, kind, command_id, number)

    async def close(self) -> None:
        """Stop watching, once the ends of commands that ended with their sandboxes are written."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSING_S)
        await tasks.cancel(list(self._tasks))

    async def _wait(
        self, box: LiveSandbox, kind: EventKind, what: dict[str, object], end: Callable[[], Awaitable[CommandInfo]]
    ) -> None:
        values = dict(what)
        try:
            info = await end()
            info.oom_killed = await for_memory(box, info)
            values |= told_of(info) | {"duration_ms": info.duration_ms, "bytes_out": info.output_bytes}
        except CarrelError:  # the sandbox has ended, or forgot the command
            values["exit"] = "gone"
        values |= what
        try:
            await self._audit.flush()  # the event of its start comes with a record, and comes first
            self._events.add([self._events.draft(kind, box.record.context_id, box.record.id, values)])
        except CarrelError as error:
            log.warning("the end of a command in %s is not in the event log: %s", box.record.id, error)
