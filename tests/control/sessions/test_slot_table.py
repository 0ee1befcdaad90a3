"""The bookkeeping of slots against a model: any order of claims, starts, failures, deaths, resizes and time."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from carrel.control.sessions.slot_table import GROWN_S, Slot, SlotCounts, SlotKind, SlotTable
from carrel.models import Network
from carrel.providers.base import Launch

MOST, AT_ONCE, IDLE_S, MOST_POOLS = 6, 2, 300.0, 3
BARE = Launch("", "", Network.NONE)
KINDS = [
    SlotKind("docker", None, None, None, BARE),
    SlotKind("docker", "data", None, None, BARE),
    SlotKind("docker", "data", None, None, replace(BARE, memory_mb=64)),
    SlotKind("gvisor", "data", "debian:12", "sha256:1", BARE),
    SlotKind("gvisor", None, "debian:12", "sha256:2", BARE),
]
COUNTS = st.tuples(st.integers(0, 8), st.integers(0, 8)).map(lambda two: SlotCounts(min(two), max(two)))


def table(most: int = MOST) -> SlotTable:
    ids = itertools.count(1)
    return SlotTable(lambda: f"slot-{next(ids)}", most=most, at_once=AT_ONCE, most_pools=MOST_POOLS, idle_s=IDLE_S)


class Bookkeeping(RuleBasedStateMachine):
    """The table, and the slots that really exist as far as it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.table = table()
        self.now = 1000.0
        self.room = 100
        self.exist: dict[str, Slot] = {}
        """Slots that are being started, run, or are being ended."""
        self.owned: set[str] = set()
        self.told_to_end: set[str] = set()

    def slots(self, state: str) -> list[Slot]:
        return [slot for slot in self.exist.values() if slot.state == state]

    @rule(kind=st.sampled_from(KINDS), counts=COUNTS)
    def cold_start(self, kind: SlotKind, counts: SlotCounts) -> None:
        self.table.add(kind, counts, self.now)

    @rule(kind=st.sampled_from(KINDS))
    def claim(self, kind: SlotKind) -> None:
        pool = self.table.find(kind)
        if pool is None:
            return
        ready = pool.in_state("ready")
        slot = self.table.take(pool, self.now)
        assert slot is (ready[0] if ready else None), "the oldest ready slot is claimed"
        if slot is not None:
            assert slot.id not in self.owned and slot.id not in self.told_to_end
            assert slot.pool.kind == kind and slot.handle == {"id": slot.id}
            del self.exist[slot.id]
            self.owned.add(slot.id)

    @rule()
    def turn(self) -> None:
        busy = {slot.pool: slot.pool.retry_at > self.now for slot in self.exist.values()}
        before = {slot.id for slot in self.exist.values()}
        moves = self.table.moves(self.now, self.room)
        for slot in moves.start:
            assert slot.id not in before and slot.state == "starting"
            assert slot.pool.retry_at <= self.now, "a pool that failed waits"
            self.exist[slot.id] = slot
        for slot in moves.end:
            assert slot.id in before and slot.id not in self.told_to_end, "a slot is ended once"
            self.told_to_end.add(slot.id)
        assert len(self.exist) <= max(MOST, len(before)), (busy, before)
        if moves.start:
            assert len(self.exist) <= min(MOST, self.room), "slots are started where there is room"
        again = self.table.moves(self.now, self.room)
        assert again == ([], []), "what was decided stays until something happens"

    @precondition(lambda self: self.slots("starting"))
    @rule(data=st.data())
    def slot_started(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.slots("starting")))
        self.table.started(slot, {"id": slot.id}, self.now)

    @precondition(lambda self: self.slots("starting"))
    @rule(data=st.data())
    def slot_failed(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.slots("starting")))
        self.table.gone(slot)
        self.table.failed(slot.pool, "no memory", self.now)
        del self.exist[slot.id]
        assert slot.pool.last_failure == "no memory" and slot.pool.retry_at > self.now

    @precondition(lambda self: self.slots("ending"))
    @rule(data=st.data(), started_meanwhile=st.booleans())
    def slot_ended(self, data: st.DataObject, started_meanwhile: bool) -> None:
        slot = data.draw(st.sampled_from(self.slots("ending")))
        if started_meanwhile:
            self.table.started(slot, {"id": slot.id}, self.now)
            assert slot.state == "ending", "nobody gets a slot that shall end"
        self.table.gone(slot)
        del self.exist[slot.id]

    @precondition(lambda self: self.slots("ready"))
    @rule(data=st.data())
    def slot_died(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.slots("ready")))
        self.table.failed(slot.pool, "it ended", self.now)
        self.table.end(slot)
        self.told_to_end.add(slot.id)

    @precondition(lambda self: self.slots("ready"))
    @rule(data=st.data())
    def slot_is_healthy(self, data: st.DataObject) -> None:
        pool = data.draw(st.sampled_from(self.slots("ready"))).pool
        self.table.worked(pool)
        assert pool.last_failure is None

    @precondition(lambda self: self.table.pools)
    @rule(data=st.data(), counts=COUNTS)
    def resize(self, data: st.DataObject, counts: SlotCounts) -> None:
        self.table.resize(data.draw(st.sampled_from(self.table.pools)), counts)

    @precondition(lambda self: self.table.pools)
    @rule(data=st.data())
    def stale(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.table.pools)).drained = True

    @rule(seconds=st.sampled_from([0.1, 1.0, 70.0, 400.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.table.age(self.now)
        for pool in self.table.pools:
            assert pool.drained or self.now - pool.asked_at <= IDLE_S
        assert sum(not pool.drained for pool in self.table.pools) <= MOST_POOLS

    @rule(room=st.integers(-2, 8))
    def sandboxes_come_and_go(self, room: int) -> None:
        self.room = room

    @rule()
    def forget(self) -> None:
        for pool in self.table.forget():
            assert pool.drained and not any(slot.pool is pool for slot in self.exist.values())

    @rule()
    def everything_settles(self) -> None:
        """When every slot that is started starts and every one that is ended ends, the pools are as full as they may."""
        self.now += 61.0  # longer than any pause
        for _ in range(40):
            self.turn()
            for slot in [*self.slots("starting")]:
                self.table.started(slot, {"id": slot.id}, self.now)
                self.table.worked(slot.pool)
            for slot in [*self.slots("ending")]:
                self.table.gone(slot)
                del self.exist[slot.id]
        wanted = sum(pool.target for pool in self.table.pools)
        assert len(self.exist) == max(0, min(wanted, MOST, self.room))
        for pool in self.table.pools:
            assert len(pool.slots) <= pool.target

    @invariant()
    def the_table_knows_what_exists(self) -> None:
        listed = [slot for pool in self.table.pools for slot in pool.slots]
        assert len(listed) == len({slot.id for slot in listed}) and {slot.id for slot in listed} == set(self.exist)
        assert not self.owned & set(self.exist), "a slot has one owner"
        assert len(self.slots("starting")) <= AT_ONCE
        for pool in self.table.pools:
            assert pool.wanted <= pool.counts.most and sum(other.kind == pool.kind for other in self.table.pools) == 1


Bookkeeping.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBookkeeping = Bookkeeping.TestCase


def test_a_pool_grows_when_it_runs_dry_and_shrinks_later() -> None:
    slots = table()
    pool = slots.add(KINDS[0], SlotCounts(1, 4), 0.0)
    assert (slots.take(pool, 1.0), pool.wanted) == (None, 2)
    assert (slots.take(pool, 2.0), pool.wanted) == (None, 4)
    assert (slots.take(pool, 3.0), pool.wanted) == (None, 4)
    slots.age(3.0 + GROWN_S)
    assert pool.wanted == 4
    slots.age(3.1 + GROWN_S)
    assert pool.wanted == 1


def test_a_dry_spell_lasts_until_the_pool_is_full_again() -> None:
    slots = table()
    pool = slots.add(KINDS[0], SlotCounts(2, 2), 0.0)
    assert not pool.dry
    assert slots.take(pool, 1.0) is None and pool.dry
    one, two = slots.moves(1.0, 100).start
    slots.started(one, {"id": one.id}, 0.0)
    assert pool.dry, "one of two is ready"
    assert slots.take(pool, 2.0) is one and slots.take(pool, 2.0) is None and pool.dry
    (three,) = slots.moves(2.0, 100).start
    for slot in (two, three):
        slots.started(slot, {"id": slot.id}, 0.0)
    assert not pool.dry


def test_a_dry_spell_ends_after_a_minute_without_a_claim_that_found_nothing() -> None:
    slots = table()
    pool = slots.add(KINDS[0], SlotCounts(2, 2), 0.0)
    slots.take(pool, 1.0)
    slots.age(1.0 + GROWN_S)
    assert pool.dry
    slots.age(1.1 + GROWN_S)
    assert not pool.dry


def test_a_pool_without_slots_is_never_dry() -> None:
    slots = table()
    pool = slots.add(KINDS[0], SlotCounts(0, 4), 0.0)
    assert slots.take(pool, 1.0) is None and not pool.dry


def test_growth_takes_no_slot_from_another_pool() -> None:
    slots = table(most=4)
    first, second = (slots.add(kind, SlotCounts(1, 4), now) for kind, now in zip(KINDS, (0.0, 1.0), strict=False))
    first.wanted = 3
    for _ in range(4):
        for slot in slots.moves(2.0, 100).start:
            slots.started(slot, {"id": slot.id}, 0.0)
    assert [len(pool.slots) for pool in (first, second)] == [3, 1]
    second.wanted = 4
    assert slots.moves(2.0, 100) == ([], [])
    third = slots.add(KINDS[2], SlotCounts(1, 4), 3.0)
    moves = slots.moves(3.0, 100)
    assert [slot.pool for slot in moves.end] == [first] and not moves.start, "its usual size is another matter"
    slots.gone(moves.end[0])
    assert [slot.pool for slot in slots.moves(3.0, 100).start] == [third]


def test_after_a_failure_one_slot_shows_whether_it_works_again() -> None:
    slots = table()
    pool = slots.add(KINDS[0], SlotCounts(2, 2), 0.0)
    for slot in slots.moves(0.0, 100).start:
        slots.gone(slot)
        slots.failed(pool, "the daemon is down", 0.0)
    assert slots.moves(0.1, 100) == ([], [])
    [one] = slots.moves(10.0, 100).start
    slots.started(one, {"id": one.id}, 0.0)
    slots.worked(pool)
    assert len(slots.moves(10.0, 100).start) == 1


def test_a_slot_that_waits_too_long_is_named():
    slots = table()
    pool = slots.add(KINDS[0], SlotCounts(2, 2), 0.0)
    first, second = slots.moves(0.0, 100).start
    slots.started(first, {"id": first.id}, 10.0)
    assert slots.too_old(pool, 5.0, 15.0) == []
    assert slots.too_old(pool, 5.0, 15.1) == [first]
    slots.started(second, {"id": second.id}, 15.0)
    slots.end(first)
    assert slots.too_old(pool, 5.0, 15.1) == []
