"""Log records that programs send to the event log: without secrets, bounded, and not too many from one caller."""

from __future__ import annotations

import time
from collections.abc import Callable

from carrel.control.operations.caller import Caller
from carrel.control.secrets.values import SecretValues
from carrel.errors import LimitExceeded
from carrel.events import EventLog
from carrel.models import LogRecords
from carrel.models.events import MAX_MESSAGE, EventKind
from carrel.primitives.cache import Cache

PER_SECOND = 200.0
BURST = 5000.0
_MOST_CALLERS = 4096


class LogIntake:
    """Takes log records. Each caller may send `PER_SECOND` of them in the long run, and `BURST` at once."""

    def __init__(self, events: EventLog, secrets: SecretValues, clock: Callable[[], float] = time.monotonic):
        self._events = events
        self._secrets = secrets
        self._clock = clock
        self._room: Cache[str, tuple[float, float]] = Cache(_MOST_CALLERS)

    async def publish(self, caller: Caller, records: LogRecords) -> int:
        """Write records to the event log and return how many."""
        self._take(caller, len(records.records))
        facts = [record.model_dump(mode="json", exclude_none=True) for record in records.records]
        if records.dropped:
            facts[0]["dropped"] = records.dropped
        cleaned = (await self._secrets.clean(records.context_id, {"records": facts}))["records"]
        assert isinstance(cleaned, list)
        drafts = []
        for values in cleaned:
            values["message"] = _short(values["message"])  # only now: half a secret would not be found
            body = {**values, "actor": caller.identity.subject}
            drafts.append(self._events.draft(EventKind.LOG, records.context_id, None, body))
        await self._events.append(drafts)
        return len(drafts)

    def _take(self, caller: Caller, count: int) -> None:
        now = self._clock()
        room, since = self._room.get(caller.identity.subject) or (BURST, now)
        room = min(BURST, room + (now - since) * PER_SECOND)
        if room < count:
            raise LimitExceeded(
                f"a caller may send {PER_SECOND:.0f} log records in a second",
                field="records",
                hint="send fewer, or raise the level of the handler",
            )
        self._room.put(caller.identity.subject, (room - count, now))


def _short(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}…"
