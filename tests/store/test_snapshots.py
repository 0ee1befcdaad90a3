from __future__ import annotations

from dataclasses import replace

import pytest

from carrel.errors import AlreadyExists, Conflict
from carrel.store import Database, SnapshotRecord, SnapshotStatus, SnapshotStore

BASE = SnapshotRecord(id="s1", context_id="c", driver="btrfs", created_at=1.0, session_id="x", labels={"a": "b"})


@pytest.fixture
def store(database: Database) -> SnapshotStore:
    return SnapshotStore(database)


async def test_a_snapshot_becomes_ready_once(store: SnapshotStore) -> None:
    await store.insert(BASE)
    assert await store.get("s1") == BASE
    with pytest.raises(AlreadyExists):
        await store.insert(BASE)
    assert await store.newest_ready("c") is None
    await store.ready("s1", size=2**40, new_bytes=5, files=3)
    ready = replace(BASE, status=SnapshotStatus.READY, bytes=2**40, new_bytes=5, files=3)
    assert await store.get("s1") == ready
    for end in (store.failed("s1", "late"), store.ready("s1", size=1, new_bytes=1, files=1), store.failed("no", "x")):
        with pytest.raises(Conflict):
            await end
    assert await store.get("s1") == await store.newest_ready("c") == ready


async def test_a_failure_keeps_the_last_good_one(store: SnapshotStore) -> None:
    for number in (1, 2, 3):
        await store.insert(replace(BASE, id=f"s{number}", created_at=float(number), parent=f"s{number - 1}"))
    await store.ready("s1", size=1, new_bytes=1, files=1)
    await store.failed("s2", "no space\0left")
    good = await store.newest_ready("c")
    assert good is not None and good.id == "s1"
    assert [record.id for record in await store.in_status(SnapshotStatus.CREATING)] == ["s3"]
    [failed] = await store.in_status(SnapshotStatus.FAILED)
    assert (failed.id, failed.error) == ("s2", "no space\ufffdleft")
    assert await store.newest_ready("other") is None
    assert await store.delete("s1") and not await store.delete("s1")


async def test_the_order_does_not_depend_on_the_clocks_of_machines(store: SnapshotStore) -> None:
    for name, moment in (("ahead", 3600.0), ("behind", 5.0), ("later", 6.0)):
        await store.insert(replace(BASE, id=name, created_at=moment))
        await store.ready(name, size=1, new_bytes=1, files=1)
    assert [each.id for each in await store.all_ready("c")] == ["later", "behind", "ahead"]


async def test_pages_hold_everything_once_newest_first(store: SnapshotStore) -> None:
    for number in range(7):
        await store.insert(replace(BASE, id=f"s{number}", created_at=float(number // 3)))
    await store.insert(replace(BASE, id="other", context_id="d"))
    seen: list[str] = []
    cursor = None
    while True:
        records, cursor = await store.page("c", limit=2, cursor=cursor)
        seen += [record.id for record in records]
        if cursor is None:
            break
    assert seen == [f"s{number}" for number in (6, 5, 4, 3, 2, 1, 0)]
