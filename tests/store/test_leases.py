from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, replace
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from sqlalchemy import Double, literal

from carrel.errors import Conflict
from carrel.store import Database, Lease, LeaseStore, SessionRecord, SessionStore

T = TypeVar("T")
OWNERS = st.sampled_from(["a", "b"])


@pytest.fixture
async def leases(database: Database, base: SessionRecord) -> LeaseStore:
    await SessionStore(database).insert(base)
    return LeaseStore(database)


async def test_a_lease_is_one_owners(leases: LeaseStore, store: SessionStore) -> None:
    assert await leases.get("sbx-1") is None
    assert await leases.acquire("sbx-1", "a", 60) == 1
    assert await leases.acquire("sbx-1", "b", 60) is None
    assert await leases.acquire("sbx-1", "a", 60) == 1, "the owner may ask again"
    assert await leases.renew_all("b", 60) == {}
    assert await leases.renew_all("a", 600) == {"sbx-1": 1}
    await store.update("sbx-1", fence=1, release=True)
    with pytest.raises(Conflict):
        await store.update("sbx-1", fence=1, release=True)
    assert await leases.get("sbx-1") is None
    assert await leases.acquire("sbx-1", "a", 60) == 2, "given back, it is a new one"
    assert await leases.acquire("absent", "a", 60) is None


async def test_an_ended_lease_may_be_taken(leases: LeaseStore) -> None:
    assert await leases.expired() == []
    assert await leases.acquire("sbx-1", "a", 0) == 1
    assert await leases.renew_all("a", 60) == {}, "it has ended, even if nobody took it"
    [ended] = await leases.expired()
    assert (ended.session_id, ended.owner, ended.fence) == ("sbx-1", "a", 1)
    assert await leases.expired(ended.until - 1) == []
    assert await leases.acquire("sbx-1", "b", 60) == 2
    assert await leases.expired() == []
    found = await leases.get("sbx-1")
    assert found is not None
    assert await leases.expired(found.until) == [found]


async def test_the_lease_ends_by_the_clock_of_the_database(leases: LeaseStore) -> None:
    assert await leases.acquire("sbx-1", "a", 0.2) == 1
    first = await leases.get("sbx-1")
    async with asyncio.timeout(60):
        while (fence := await leases.acquire("sbx-1", "b", 60)) is None:
            await asyncio.sleep(0.005)
    second = await leases.get("sbx-1")
    assert fence == 2
    assert first is not None and second is not None
    assert second.until - 60 > first.until - 0.001, "not before it had ended"


@dataclass
class Model:
    owner: str | None = None
    until: float = 0.0
    fence: int = 0


async def test_two_owners_in_any_order(where: str, base: SessionRecord) -> None:
    """A state machine in a thread, its steps on the real database in this loop, time set by the machine."""
    database = await Database.open(where)
    loop = asyncio.get_running_loop()
    sessions = SessionStore(database)
    made = iter(range(1_000_000))

    def wait(work: Coroutine[object, object, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, loop).result(30)

    class Owners(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.now = 1000.0
            self.id = f"s{next(made)}"
            self.model = Model()
            self.given: list[int] = []
            self.leases = LeaseStore(database, lambda: literal(self.now, Double))
            wait(sessions.insert(replace(base, id=self.id, context_id=self.id)))

        @rule(owner=OWNERS, seconds=st.integers(1, 10))
        def acquire(self, owner: str, seconds: int) -> None:
            fence = wait(self.leases.acquire(self.id, owner, seconds))
            model = self.model
            live = model.owner is not None and model.until > self.now
            if live and model.owner != owner:
                assert fence is None
                return
            assert fence == model.fence + (not live)
            if not live:
                assert all(fence > older for older in self.given)
                self.given.append(fence)
            self.model = Model(owner, self.now + seconds, fence)

        @rule(owner=OWNERS, seconds=st.integers(1, 10))
        def renew(self, owner: str, seconds: int) -> None:
            model = self.model
            mine = model.owner == owner and model.until > self.now
            assert wait(self.leases.renew_all(owner, seconds)).get(self.id) == (model.fence if mine else None)
            if mine:
                model.until = self.now + seconds

        @rule(older=st.integers(0, 2))
        def release(self, older: int) -> None:
            try:
                wait(sessions.update(self.id, fence=self.model.fence - older, release=True))
            except Conflict:
                assert older or self.model.owner is None
            else:
                assert older == 0 and self.model.owner is not None
                self.model = Model(None, 0, self.model.fence)

        @rule(older=st.integers(-1, 2), name=st.text("xyz", min_size=1, max_size=5))
        def write(self, older: int, name: str) -> None:
            before = wait(sessions.get(self.id))
            assert before is not None
            try:
                wait(sessions.update(self.id, fence=self.model.fence - older, provider=name))
            except Conflict:
                assert older or self.model.owner is None
                assert wait(sessions.get(self.id)) == before
            else:
                assert older == 0 and self.model.owner is not None
                assert wait(sessions.get(self.id)) == replace(before, provider=name)

        @rule(seconds=st.integers(1, 12))
        def time_passes(self, seconds: int) -> None:
            self.now += seconds

        @invariant()
        def it_is_as_modelled(self) -> None:
            model = self.model
            found = wait(self.leases.get(self.id))
            assert found == (Lease(self.id, model.owner, model.until, model.fence) if model.owner else None)
            ended = [each for each in wait(self.leases.expired()) if each.session_id == self.id]
            assert bool(ended) == (model.owner is not None and model.until <= self.now)

    checks = list(HealthCheck)
    few = settings(max_examples=15, stateful_step_count=20, deadline=None, suppress_health_check=checks, database=None)
    try:
        await asyncio.to_thread(run_state_machine_as_test, Owners, settings=few)
    finally:
        await database.close()


@pytest.fixture
async def two(where: str) -> AsyncIterator[list[Database]]:
    databases = [await Database.open(where), await Database.open(where)]
    yield databases
    for database in databases:
        await database.close()


ROUNDS = 60


async def test_many_race_and_one_has_it(two: list[Database], base: SessionRecord) -> None:
    await SessionStore(two[0]).insert(base)
    fences: list[int] = []
    holding: list[str] = []
    refused = 0
    released = asyncio.Event()

    async def compete(database: Database, owner: str) -> None:
        nonlocal refused
        leases, store = LeaseStore(database), SessionStore(database)
        while len(fences) < ROUNDS:
            fence = await leases.acquire("sbx-1", owner, 60)
            if fence is None:
                refused += 1
                await released.wait()  # then all rush at once; asking without end would leave no time to hold it
                await asyncio.sleep(0.005)  # it may be set for a lease that somebody else has taken meanwhile
                continue
            assert not holding, f"{owner} and {holding} at once"
            holding.append(owner)
            released.clear()
            fences.append(fence)
            await store.update("sbx-1", fence=fence, end_reason=owner)
            record = await store.get("sbx-1")
            assert record is not None and (record.lease_owner, record.end_reason) == (owner, owner)
            assert await leases.renew_all(owner, 60) == {"sbx-1": fence}
            holding.remove(owner)
            await store.update("sbx-1", fence=fence, release=True)
            released.set()

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for number in range(8):
            for side, database in enumerate(two):
                group.create_task(compete(database, f"{side}-{number}"))
    assert len(fences) >= ROUNDS and fences == list(range(1, len(fences) + 1))
    assert refused, "there was no race"


async def test_many_race_for_what_the_dead_left(two: list[Database], base: SessionRecord) -> None:
    """Owners that never give back and never renew: the next one takes over, and the last one can write no more."""
    await SessionStore(two[0]).insert(base)
    fences: list[int] = []
    lives = itertools.count()

    async def die(database: Database, owner: str) -> None:
        leases, store = LeaseStore(database), SessionStore(database)
        while len(fences) < 40:
            fence = await leases.acquire("sbx-1", f"{owner}-{next(lives)}", 0.01)
            if fence is None:
                continue
            fences.append(fence)
            try:
                await store.update("sbx-1", fence=fence, end_reason=str(fence))
            except Conflict:
                assert max(fences) > fence or (await store.get("sbx-1")).fence > fence  # type: ignore[union-attr]

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for number in range(8):
            for side, database in enumerate(two):
                group.create_task(die(database, f"{side}-{number}"))
    assert sorted(fences) == list(range(1, len(fences) + 1)), "no fence was given twice"
