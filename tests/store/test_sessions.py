from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.errors import Conflict, InvalidRequest
from carrel.models import Limits, Network, State, Trust
from carrel.store import Database, SessionRecord, SessionStore
from carrel.store.sessions import decode_cursor, encode_cursor

BASE = SessionRecord(
    id="sbx-1",
    context_id="c1",
    ephemeral=False,
    state=State.CREATING,
    provider="namespace",
    isolation_level=1,
    unsafe=False,
    trust=Trust.MEDIUM,
    network=Network.NONE,
    limits=Limits(memory_mb=64),
    created_at=1.5,
    last_activity_at=2.5,
    env={"A": "b"},
    labels={"team": "x"},
)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SessionStore]:
    database = await Database.open(str(tmp_path / "carrel.db"))
    yield SessionStore(database)
    await database.close()


async def test_round_trip(store: SessionStore) -> None:
    await store.insert(BASE)
    assert await store.get("sbx-1") == BASE
    assert await store.of_context("c1") == BASE
    assert await store.get("c1") is None
    await store.update("sbx-1", state=State.RUNNING, handle={"socket": "/x", "pid": 3, "ok": True})
    record = await store.get("sbx-1")
    assert record is not None
    assert (record.state, record.handle) == (State.RUNNING, {"socket": "/x", "pid": 3, "ok": True})
    await store.update("sbx-1", handle=None)
    record = await store.get("sbx-1")
    assert record is not None and record.handle is None


async def test_one_session_of_a_context_unless_terminated(store: SessionStore) -> None:
    await store.insert(BASE)
    with pytest.raises(Conflict):
        await store.insert(replace(BASE, id="sbx-2"))
    await store.update("sbx-1", state=State.TERMINATED)
    await store.insert(replace(BASE, id="sbx-2"))
    found = await store.of_context("c1")
    assert found is not None and found.id == "sbx-2"


async def test_idempotency_key_is_unique(store: SessionStore) -> None:
    await store.insert(replace(BASE, idempotency_key="k"))
    with pytest.raises(Conflict):
        await store.insert(replace(BASE, id="sbx-2", context_id="c2", idempotency_key="k"))
    found = await store.of_key("k")
    assert found is not None and found.id == "sbx-1"


async def test_pages_hold_everything_once_newest_first(store: SessionStore) -> None:
    for number in range(7):
        at = float(number // 3)  # some share their time
        await store.insert(replace(BASE, id=f"sbx-{number}", context_id=f"c{number}", created_at=at))
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


async def test_touch_never_moves_back(store: SessionStore) -> None:
    await store.insert(BASE)
    await store.touch({"sbx-1": 9.0, "absent": 3.0})
    await store.touch({"sbx-1": 4.0})
    record = await store.get("sbx-1")
    assert record is not None and record.last_activity_at == 9.0


async def test_states(store: SessionStore) -> None:
    await store.insert(BASE)
    assert await store.count([State.CREATING]) == 1
    assert await store.in_states([State.RUNNING]) == []
    assert [record.id for record in await store.in_states([State.CREATING, State.RUNNING])] == ["sbx-1"]


@given(st.floats(0, 1e11), st.text(min_size=1, max_size=64))
def test_cursor_round_trip(created: float, name: str) -> None:
    assert decode_cursor(encode_cursor(replace(BASE, created_at=created, id=name))) == (created, name)


@given(st.text(max_size=80))
def test_any_cursor_is_read_or_refused(text: str) -> None:
    try:
        decode_cursor(text)
    except InvalidRequest as error:
        assert error.field == "cursor"
