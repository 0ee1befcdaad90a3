from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from carrel.errors import Conflict
from carrel.models import State
from carrel.store import Database, LeaseStore, SessionRecord, SessionStore


async def test_round_trip(store: SessionStore, base: SessionRecord) -> None:
    await store.insert(base)
    assert await store.get("sbx-1") == base
    assert await store.of_context("c1") == base
    assert await store.get("c1") is None
    await store.update("sbx-1", state=State.RUNNING, handle={"socket": "/x", "pid": 3, "ok": True})
    record = await store.get("sbx-1")
    assert record is not None
    assert (record.state, record.handle) == (State.RUNNING, {"socket": "/x", "pid": 3, "ok": True})
    await store.update("sbx-1", handle=None)
    record = await store.get("sbx-1")
    assert record is not None and record.handle is None


async def test_one_session_of_a_context_unless_terminated(store: SessionStore, base: SessionRecord) -> None:
    await store.insert(base)
    with pytest.raises(Conflict):
        await store.insert(replace(base, id="sbx-2"))
    await store.update("sbx-1", state=State.TERMINATED)
    await store.insert(replace(base, id="sbx-2"))
    found = await store.of_context("c1")
    assert found is not None and found.id == "sbx-2"


async def test_idempotency_key_is_unique(store: SessionStore, base: SessionRecord) -> None:
    await store.insert(replace(base, idempotency_key="k"))
    with pytest.raises(Conflict):
        await store.insert(replace(base, id="sbx-2", context_id="c2", idempotency_key="k"))
    found = await store.of_key("k")
    assert found is not None and found.id == "sbx-1"


async def test_pages_hold_everything_once_newest_first(store: SessionStore, base: SessionRecord) -> None:
    for number in range(7):
        at = float(number // 3)  # some share their time
        await store.insert(replace(base, id=f"sbx-{number}", context_id=f"c{number}", created_at=at))
    seen: list[str] = []
    cursor = None
    while True:
        records, cursor = await store.page(limit=2, cursor=cursor)
        assert len(records) <= 2
        seen += [record.id for record in records]
        if cursor is None:
            break
    assert seen == [f"sbx-{number}" for number in (6, 5, 4, 3, 2, 1, 0)]
    records, _ = await store.page(limit=9, context_id="c3")
    assert [record.id for record in records] == ["sbx-3"]
    assert (await store.page(limit=9, states=[State.ERROR])) == ([], None)


async def test_touch_never_moves_back(store: SessionStore, base: SessionRecord) -> None:
    await store.insert(base)
    await store.touch({"sbx-1": 9.0, "absent": 3.0})
    await store.touch({"sbx-1": 4.0})
    record = await store.get("sbx-1")
    assert record is not None and record.last_activity_at == 9.0


async def test_states(store: SessionStore, base: SessionRecord) -> None:
    await store.insert(base)
    assert await store.in_states([State.RUNNING]) == []
    assert [record.id for record in await store.in_states([State.CREATING, State.RUNNING])] == ["sbx-1"]


async def test_what_a_stale_fence_may_not_do(database: Database, store: SessionStore, base: SessionRecord) -> None:
    leases = LeaseStore(database)
    await store.insert(base)
    fence = await leases.acquire("sbx-1", "a", 60)
    assert fence == 1
    await store.update("sbx-1", fence=fence, state=State.RUNNING)
    await store.update("sbx-1", fence=fence, release=True)
    for taken in (False, True):
        if taken:
            assert await leases.acquire("sbx-1", "b", 60) == 2
        before = await store.get("sbx-1")
        with pytest.raises(Conflict) as caught:
            await store.update("sbx-1", fence=fence, state=State.ERROR)
        assert caught.value.field == "fence" and caught.value.hint
        assert await store.get("sbx-1") == before
    with pytest.raises(Conflict):
        await store.update("absent", fence=1, state=State.ERROR)


@pytest.mark.parametrize("name", ["lease_owner", "lease_until"])
async def test_only_a_lease_changes_a_lease(store: SessionStore, base: SessionRecord, name: str) -> None:
    await store.insert(replace(base, lease_owner="me", lease_until=9e9, fence=7))
    record = await store.get("sbx-1")
    assert record is not None and (record.lease_owner, record.lease_until, record.fence) == (None, None, 0)
    with pytest.raises(TypeError):
        await store.update("sbx-1", **{name: None})


async def test_any_text_can_be_written_and_asked_for(store: SessionStore, base: SessionRecord) -> None:
    odd = "a\0b\udc80c ü 💡"
    await store.insert(replace(base, labels={odd: odd}, env={"A": odd}, handle={"x": odd}))
    await store.update("sbx-1", error=odd, end_reason=odd * 10_000)
    record = await store.get("sbx-1")
    assert record is not None
    assert (record.error, record.labels, record.handle) == ("a\ufffdb\ufffdc ü 💡", {odd: odd}, {"x": odd})
    assert await store.get(odd) is None
    assert await store.of_context(odd * 100) is None
    assert await store.page(limit=1, context_id=odd) == ([], None)


async def test_many_at_once(store: SessionStore, base: SessionRecord) -> None:
    made = [replace(base, id=f"sbx-{number}", context_id="same") for number in range(30)]
    done = await asyncio.gather(*(store.insert(record) for record in made), return_exceptions=True)
    assert sum(result is None for result in done) == 1
    assert all(result is None or isinstance(result, Conflict) for result in done)
    assert len(await store.in_states(list(State))) == 1
