from __future__ import annotations

import time
from pathlib import Path

import pytest

from carrel.control.nodes.workers import Worker
from carrel.control.sessions.leases import Leases
from carrel.errors import RunsElsewhere
from carrel.models import Limits, Network, State, Trust
from carrel.store import Database, SessionRecord, SessionStore
from carrel.store.clock import database_clock
from carrel.store.leases import LeaseStore

RECORD = SessionRecord(
    "sbx-1", "c", False, State.RUNNING, "namespace", 1, False, Trust.MEDIUM, Network.NONE, Limits(), 1.0, 1.0, node="a"
)


async def test_taking_keeping_and_losing(tmp_path: Path) -> None:
    database = await Database.open(str(tmp_path / "db"))
    try:
        store, leases = SessionStore(database), LeaseStore(database)
        a, b = (Leases(leases, Worker(name), 30.0, shared=False) for name in ("a", "b"))
        await store.insert(RECORD, a.lease)
        assert (await a.take(RECORD)).fence == 1
        assert (await a.take(RECORD, anew=True)).fence == 2
        with pytest.raises(RunsElsewhere, match="server 'a'"):
            await b.take(RECORD)
        before = time.monotonic()
        held, deadline = await a.renew()
        assert held == {"sbx-1": 2}
        assert before <= deadline - 30 <= time.monotonic()
        assert await b.abandoned() == []
        assert await b.revoke((await store.get("sbx-1")) or RECORD) is None
        await LeaseStore(database, lambda: database_clock() - 3600.0).renew_all("a", 1.0)
        assert await b.abandoned() == ["sbx-1"]
        assert await a.abandoned() == []
        revoked = await b.revoke((await store.get("sbx-1")) or RECORD)
        assert revoked is not None and revoked.fence == 3
        taken = await b.take(RECORD)
        assert taken.fence == 4
        await b.hand_back(taken, "a")
        lease = await leases.get("sbx-1")
        assert lease is not None and (lease.owner, lease.until) == ("a", 0.0)
    finally:
        await database.close()


async def test_after_a_time_without_the_database_a_server_waits_for_the_others(tmp_path: Path) -> None:
    database = await Database.open(str(tmp_path / "db"))
    try:
        store, leases = SessionStore(database), LeaseStore(database)
        a, b = (Leases(leases, Worker(name), 30.0, shared=True) for name in ("a", "b"))
        await store.insert(RECORD, a.lease)
        ended = LeaseStore(database, lambda: database_clock() - 100.0)
        assert await ended.renew_all("a", 30.0)  # so it ended 70 seconds ago
        assert await b.abandoned() == [], "it has just started"
        with pytest.raises(RunsElsewhere, match="'a'"):
            await b.take(RECORD)
        b._connected = b._renewed = time.monotonic() - 16  # no renewal for more than half of a lease
        with pytest.raises(RunsElsewhere):
            await b.take(RECORD)
        await b.renew()
        assert b._connected == b._renewed
        with pytest.raises(RunsElsewhere):
            await b.take(RECORD)
        assert (await a.take(RECORD)).fence == 2, "its owner is back"
        assert await ended.renew_all("a", 95.0)  # ended 5 seconds ago
        b._connected = time.monotonic() - 20
        assert (await b.take(RECORD)).fence == 3, "it ended while this server had the database"
        assert await LeaseStore(database, lambda: database_clock() - 200.0).renew_all("b", 30.0)
        await store.update(RECORD.id, fence=3, state=State.STOPPED)
        c = Leases(leases, Worker("c"), 30.0, shared=True)
        assert (await c.take(RECORD)).fence == 4, "nothing runs that could be lost"
    finally:
        await database.close()
