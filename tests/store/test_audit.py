from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.errors import Conflict
from carrel.models.events import EventDraft
from carrel.store import Database
from carrel.store.audit import AuditHead, AuditHold, AuditStore
from carrel.store.batch_writer import decoded, encoded
from carrel.store.batches import AuditRow, BatchesHere


@pytest.fixture
def store(database: Database) -> AuditStore:
    return AuditStore(database, BatchesHere(database))


def record(chain: str, seq: int, type: str = "whole", ref: int | None = None, **changes: object) -> AuditRow:
    result = None if type == "begin" else "ok"
    return (chain, seq, float(seq), type, ref, "a", "shell", "run", "allow", result, b"h%d" % seq, f"body {seq}")


def head(chain: str, seq: int, at: float = 0.0) -> AuditHead:
    return (chain, seq, f"{seq:064x}", seq, at, "k" * 64, "s" * 128)


async def put(
    store: AuditStore, *rows: AuditRow, heads: tuple[AuditHead, ...] = (), holds: tuple[AuditHold, ...] = ()
) -> None:
    await store.append((rows, heads, holds, []))


async def test_appending_knows_where_chains_end(store: AuditStore) -> None:
    assert await store.tips(["a", "b"]) == {"a": (0, b"", 0), "b": (0, b"", 0)}
    await put(store, record("a", 1))
    assert await store.tips(["a", "b"]) == {"a": (1, b"h1", 0), "b": (0, b"", 0)}
    await put(store, record("a", 2))
    await put(store, heads=(head("a", 2), head("b", 7)))
    assert await store.tip("a") == (2, b"h2", 2)
    assert await store.tip("b") == (7, bytes.fromhex(f"{7:064x}"), 7), "pruned to nothing"


async def test_a_place_is_given_once(store: AuditStore) -> None:
    await put(store, record("a", 1))
    with pytest.raises(Conflict):
        await put(store, record("b", 1), record("a", 1))
    assert await store.tip("b") == (0, b"", 0), "all or nothing"
    await put(store, heads=(head("a", 1),))
    with pytest.raises(Conflict):
        await put(store, record("a", 2), heads=(head("a", 1),))


async def test_many_race_for_the_next_place(where: str) -> None:
    databases = [await Database.open(where), await Database.open(where)]

    async def work(store: AuditStore) -> None:
        done = 0
        while done < 5:
            try:
                await put(store, record("a", (await store.tip("a"))[0] + 1))
                done += 1
            except Conflict:
                pass

    try:
        stores = [AuditStore(database, BatchesHere(database)) for database in databases]
        await asyncio.gather(*(work(store) for store in stores * 4))
        assert [seq for seq, _, _ in await stores[0].records("a", until=100, limit=100)] == list(range(1, 41))
    finally:
        for database in databases:
            await database.close()


async def test_whether_a_batch_was_written(store: AuditStore) -> None:
    mine, head_of_mine = ([record("a", 1), record("a", 2)], [], [], []), ([], [head("a", 2)], [], [])
    assert not await store.has(mine) and not await store.has(head_of_mine)
    await store.append(mine)
    await store.append(head_of_mine)
    assert await store.has(mine) and await store.has(head_of_mine)
    another = (*record("a", 2)[:10], b"another", "body")
    assert not await store.has(([another], [], [], [])), "somebody else has the place"
    assert not await store.has(([], [], [("a", "n", 1, False)], [])), "it may be written again"


names = st.text(max_size=20)
rows = st.tuples(
    names, st.integers(), st.floats(allow_nan=False), names, st.none() | st.integers(), *[names] * 4,
    st.none() | names, st.binary(max_size=32), names,
)  # fmt: skip
drafts = st.builds(EventDraft, st.floats(allow_nan=False), names, st.none() | names, st.none() | names, names, names)


@given(
    st.lists(rows, max_size=3),
    st.lists(drafts, max_size=3),
    st.lists(st.tuples(names, names, st.integers(), st.booleans())),
)
def test_a_batch_travels_between_workers_as_it_is(
    records: list[AuditRow], events: list[EventDraft], holds: list[AuditHold]
) -> None:
    batch = (records, [head("a", 1)], holds, events)
    assert decoded(encoded(batch)) == batch


async def test_reading_in_order(store: AuditStore) -> None:
    await put(store, *(record("a", seq) for seq in (2, 1, 3, 5, 4)), record("b", 1), heads=(head("a", 4), head("a", 2)))
    assert [seq for seq, _, _ in await store.records("a", after=1, until=4, limit=2)] == [2, 3]
    assert await store.records("a", after=4, until=9, limit=9) == [(5, b"h5", "body 5")]
    assert await store.heads("a") == [head("a", 2), head("a", 4)] and await store.heads("a", after=2) == [head("a", 4)]


async def test_who_continues_a_chain(store: AuditStore) -> None:
    await put(store, holds=(("a", "n", 1, False), ("b", "n", 4, True), ("c", "m", 1, False)))
    assert await store.unclean("n") == [("a", "n", 1, False)]
    await put(store, holds=(("a", "m", 9, False),))
    assert await store.unclean("n") == [("a", "n", 1, False)], "what one says is not said of the other"
    assert await store.holds("a") == [("a", "m", 9, False), ("a", "n", 1, False)]
    await put(store, holds=(("a", "n", 10, True),))
    assert await store.unclean("n") == [] and await store.holds("absent") == []
    assert await store.chains() == ["a", "b", "c"] and await store.chains(after="a", limit=1) == ["b"]


async def test_begins_without_an_end(store: AuditStore) -> None:
    rows = [
        record("a", 1, "begin"),
        record("a", 2, "begin"),
        record("a", 3, "end", 1),
        record("a", 4),
        record("b", 1, "end", 2),
    ]
    await put(store, *rows)
    assert await store.unfinished("a", 0) == [(2, b"h2", "body 2")]
    assert await store.unfinished("a", 3) == [] and await store.unfinished("b", 0) == []


async def test_pruning_keeps_the_head(store: AuditStore) -> None:
    for chain in ("a", "b"):
        rows = [record(chain, seq) for seq in range(1, 7)]
        heads = (head(chain, 2, 10.0), head(chain, 4, 20.0), head(chain, 6, 30.0))
        await put(store, *rows, heads=heads, holds=((chain, "n", 7, True),))
    assert await store.head_before("a", 25.0) == head("a", 4, 20.0) and await store.head_before("a", 5.0) is None
    assert await store.aged(5.0) == [] and await store.aged(10.0) == ["a", "b"]
    assert await store.aged(10.0, after="a") == ["b"]
    assert await store.prune("a", 4, whole=True) == 4
    assert await store.aged(25.0) == ["b"], "what is gone is not old"
    assert [seq for seq, _, _ in await store.records("a", until=9, limit=9)] == [5, 6]
    assert await store.heads("a") == [head("a", 4, 20.0), head("a", 6, 30.0)]
    assert await store.prune("a", 6, whole=False) == 2
    assert await store.tip("a") == (6, bytes.fromhex(f"{6:064x}"), 6) and await store.chains() == ["a", "b"]
    assert await store.prune("b", 6, whole=True) == 6
    assert await store.tip("b") == (0, b"", 0) and await store.chains() == ["a"]
