from __future__ import annotations

import pytest

from carrel.store import Database
from carrel.store.audit import AuditStore
from carrel.store.audit_search import WINDOW
from carrel.store.batches import AuditRow, BatchesHere
from carrel.store.cursors import encode_cursor


def record(seq: int, at: float, type: str = "whole", **values: str) -> AuditRow:
    given = {"chain": "a", "actor": "a", "kind": "shell", "name": "run", "decision": "allow", "text": "x", **values}
    body = f'{{"seq":{seq},"arguments":{{"command":"{given["text"]}"}}}}'
    ref = seq - 1 if type == "end" else None
    result = None if type == "begin" else given.get("result", "ok")
    names = (given["actor"], given["kind"], given["name"], given["decision"])
    return (given["chain"], seq, at, type, ref, *names, result, b"h", body)


@pytest.fixture
def store(database: Database) -> AuditStore:
    return AuditStore(database, BatchesHere(database))


async def put(store: AuditStore, *rows: AuditRow) -> None:
    await store.append((rows, [], [], []))


async def seqs(store: AuditStore, equal: dict[str, str], **settings: object) -> tuple[list[int], str | None]:
    found, cursor = await store.search(equal, **{"limit": 100, **settings})  # type: ignore[arg-type]
    return [seq for _, seq, *_ in found], cursor


async def test_newest_first_and_by_the_order_of_writing(store: AuditStore) -> None:
    await put(store, record(1, 5.0), record(2, 5.0), record(3, 4.0), record(4, 6.0))
    assert await seqs(store, {}) == ([4, 2, 1, 3], None)
    first, cursor = await seqs(store, {}, limit=2)
    assert first == [4, 2] and cursor is not None
    assert await seqs(store, {}, limit=2, cursor=cursor) == ([1, 3], None)
    assert await seqs(store, {}, since=4.5, until=5.5) == ([2, 1], None)


async def test_a_window_ends_and_the_cursor_goes_on(store: AuditStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carrel.store.audit_search.WINDOW", 10)
    rows = [record(seq, float(seq), actor="b", name="rare" if seq == 3 else "run") for seq in range(1, 36)]
    await put(store, *rows)
    found: list[int] = []
    pages, cursor = 0, None
    while True:
        page, cursor = await seqs(store, {"actor": "b", "name": "rare"}, cursor=cursor)
        pages += 1
        found += page
        if cursor is None:
            break
    assert (found, pages) == ([3], 4)
    assert WINDOW >= 1000


async def test_results_are_of_ends_and_arguments_of_begins(store: AuditStore) -> None:
    await put(
        store,
        record(1, 1.0, "begin", text="find me"),
        record(2, 2.0, "end", result="timeout", text="not in an end"),
        record(3, 3.0, "begin", text="find me"),
        record(4, 4.0, "whole", result="denied", text="find me too"),
    )
    assert await seqs(store, {"result": "timeout"}) == ([2], None)
    assert await seqs(store, {"result": "denied"}) == ([4], None)
    assert await seqs(store, {}) == ([4, 3, 1], None)
    assert await seqs(store, {}, text="FIND me") == ([4, 3, 1], None)
    assert await seqs(store, {"result": "timeout"}, text="find") == ([1], None)
    assert await seqs(store, {"result": "denied", "kind": "shell"}, text="find") == ([4], None)
    assert await seqs(store, {}, text="%") == ([], None) and await seqs(store, {}, text="_") == ([], None)
    found, _ = await store.search({"result": "timeout"}, limit=1)
    assert found[0][1:3] == (2, 1) and found[0][4] == '{"seq":1,"arguments":{"command":"find me"}}'
    found, _ = await store.search({}, limit=9)
    assert [(seq, other and other[:8]) for _, seq, _, _, other in found] == [(4, None), (3, None), (1, '{"seq":2')]


async def test_a_strange_cursor_finds_nothing_or_something_but_does_not_fail(store: AuditStore) -> None:
    await put(store, record(1, 4.0), record(2, 6.0))
    assert await seqs(store, {}, cursor=encode_cursor(5.0, "not a number")) == ([1], None)
