from __future__ import annotations

import json
from typing import Any, cast

from carrel.control.egress.connection_events import MOST_HOSTS, OTHERS, ConnectionEvents
from carrel.events import EventLog
from carrel.models.events import EventDraft, EventKind, body_of


class Kept:
    """An event log that keeps what is added."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    def draft(self, kind: EventKind, context: str | None, session: str | None, values: dict[str, object]) -> EventDraft:
        return EventDraft(1.0, kind.value, context, session, "n", body_of(values))

    def tell(self, drafts: list[EventDraft]) -> None:
        self.bodies += [json.loads(draft.body) for draft in drafts]


async def test_a_host_has_two_events_in_a_minute_however_often_it_is_reached() -> None:
    log = Kept()
    sums = ConnectionEvents(cast(EventLog, log))
    for _ in range(1000):
        sums.ended("c", "s", "example.org", 443, "ok", 10, 1)
    sums.ended("c", "s", "example.org", 443, "denied_by_policy", 0, 0)
    assert [(each["result"], each["count"]) for each in log.bodies] == [("ok", 1), ("denied_by_policy", 1)]
    await sums.flush()
    last = log.bodies[2:]
    assert [(each["host"], each["count"], each["bytes_in"], each["bytes_out"]) for each in last] == [
        ("example.org", 999, 9990, 999)
    ]
    await sums.flush()
    assert len(log.bodies) == 3
    sums.ended("c", "s", "example.org", 443, "ok", 10, 1)
    assert log.bodies[3]["count"] == 1, "the next minute begins anew"


async def test_many_hosts_are_summed_up_together_and_do_not_crowd_out_others() -> None:
    log = Kept()
    sums = ConnectionEvents(cast(EventLog, log))
    for number in range(10 * MOST_HOSTS):
        sums.ended("c", "s", f"h{number}.example.org", 443, "ok", 1, 1)
    sums.ended("c", "another", "example.org", 443, "ok", 1, 1)
    await sums.flush()
    assert len(log.bodies) == MOST_HOSTS + 3
    assert log.bodies[-1]["host"] == OTHERS
    assert sum(each["count"] for each in log.bodies) == 10 * MOST_HOSTS + 1
    assert "example.org" in [each["host"] for each in log.bodies]
