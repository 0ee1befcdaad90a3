"""Events of outbound connections: for each host the first one of a minute at once, and a sum of the others at its end.

A sandbox may connect thousands of times in a second, so there is never an event for each; the audit log has them all.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import NamedTuple

from carrel.events import EventLog
from carrel.models.events import EventDraft, EventKind

MINUTE_S = 60.0
MOST_HOSTS = 100
"""The most hosts of a sandbox that have sums of their own in a minute."""
MOST_SUMS = 10_000
OTHERS = "…"
"""The host of the sum for all further hosts."""


class _Key(NamedTuple):
    context_id: str | None
    session_id: str
    host: str
    port: int | None
    result: str


@dataclass(slots=True)
class _Sum:
    count: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


class ConnectionEvents:
    """The sums of one server."""

    def __init__(self, events: EventLog):
        self._events = events
        self._sums: dict[_Key, _Sum] = {}
        self._hosts: dict[str, int] = {}

    def ended(
        self,
        context_id: str | None,
        session_id: str,
        host: str,
        port: int | None,
        result: str,
        bytes_in: int,
        bytes_out: int,
    ) -> None:
        """Count an access that has ended or was refused. `host` has no secrets any more."""
        key = _Key(context_id, session_id, host, port, result)
        if key not in self._sums and (self._hosts.get(session_id, 0) >= MOST_HOSTS or len(self._sums) >= MOST_SUMS):
            key = _Key(context_id, session_id, OTHERS, None, "mixed")
        found = self._sums.get(key)
        if found is not None:
            found.count += 1
            found.bytes_in += bytes_in
            found.bytes_out += bytes_out
            return
        self._sums[key] = _Sum()
        self._hosts[session_id] = self._hosts.get(session_id, 0) + 1
        self._events.tell([self._draft(key, _Sum(1, bytes_in, bytes_out))])

    async def flush(self) -> None:
        """End the minute: write the sums of what followed the first access. Never waits."""
        sums, self._sums, self._hosts = self._sums, {}, {}
        self._events.tell([self._draft(key, found) for key, found in sums.items() if found.count])
        await asyncio.sleep(0)

    def _draft(self, key: _Key, found: _Sum) -> EventDraft:
        values = {
            "host": key.host,
            "port": key.port,
            "result": key.result,
            "count": found.count,
            "bytes_in": found.bytes_in,
            "bytes_out": found.bytes_out,
        }
        return self._events.draft(EventKind.CONNECTION, key.context_id, key.session_id, values)
