from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from sqlalchemy.engine import Connection

from carrel.errors import AlreadyExists, PlatformError
from carrel.store import Database, tokens
from carrel.store.tokens import TokenRecord, TokenStore

BASE = TokenRecord(
    "tok-1", "ci", "ab" * 32, "service", ("operate", "read"), "team", ("team:a", "team:b"), 5.0, "me", 9.0
)


@pytest.fixture
def store(database: Database) -> TokenStore:
    return TokenStore(database)


async def test_what_is_put_in_comes_out(store: TokenStore) -> None:
    plain = BASE._replace(id="tok-2", hash="cd" * 32, namespace=None, contexts=None, expires_at=None)
    for record in (BASE, plain):
        await store.insert(record)
        assert await store.get(record.id) == record and await store.of_hash(record.hash) == record
    assert await store.get("absent") is None and await store.of_hash("absent") is None


async def test_new_hashes_are_looked_up_together(store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    await store.insert(BASE)
    read, asked = store._database.read, 0
    monkeypatch.setattr(tokens, "_MOST_AT_ONCE", 50)

    async def counted(work: Callable[[Connection], list[TokenRecord]]) -> list[TokenRecord]:
        nonlocal asked
        asked += 1
        return await read(work)

    monkeypatch.setattr(store._database, "read", counted)
    wanted = [*(f"{number:064x}" for number in range(99)), BASE.hash, BASE.hash]
    found = await asyncio.gather(*(store.of_new_hash(hash) for hash in wanted))
    assert found == [None] * 99 + [BASE, BASE]
    assert asked == 2
    assert not store._wanted


async def test_look_up_goes_on_when_the_caller_that_runs_it_is_cancelled(
    store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.insert(BASE)
    read, begun, go = store._database.read, asyncio.Event(), asyncio.Event()

    async def slow(work: Callable[[Connection], list[TokenRecord]]) -> list[TokenRecord]:
        begun.set()
        await go.wait()
        return await read(work)

    monkeypatch.setattr(store._database, "read", slow)
    first = asyncio.ensure_future(store.of_new_hash(BASE.hash))
    second = asyncio.ensure_future(store.of_new_hash(BASE.hash))
    await begun.wait()
    first.cancel()
    go.set()
    assert await second == BASE
    assert first.cancelled()


async def test_failed_look_up_fails_for_all_who_wait(store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(_work: object) -> None:
        raise PlatformError("the database is gone")

    monkeypatch.setattr(store._database, "read", broken)
    found = await asyncio.gather(*(store.of_new_hash(hash) for hash in "ab"), return_exceptions=True)
    assert [type(each) for each in found] == [PlatformError, PlatformError]


@pytest.mark.parametrize("same", [{"id": "tok-2"}, {"hash": "cd" * 32}])
async def test_ids_and_hashes_are_unique(store: TokenStore, same: dict[str, str]) -> None:
    await store.insert(BASE)
    with pytest.raises(AlreadyExists):
        await store.insert(BASE._replace(id="tok-2", hash="cd" * 32)._replace(**{
            name: getattr(BASE, name) for name in ("id", "hash") if name not in same
        }))  # fmt: skip


async def test_revoked_once_and_used(store: TokenStore) -> None:
    await store.insert(BASE)
    await store.used("tok-1", 6.0)
    assert await store.revoke("tok-1", 7.0) and not await store.revoke("tok-1", 8.0)
    assert not await store.revoke("absent", 8.0)
    assert await store.get("tok-1") == BASE._replace(used_at=6.0, revoked_at=7.0)


async def test_pages(store: TokenStore) -> None:
    for number in range(5):
        await store.insert(BASE._replace(id=f"tok-{number}", hash=f"{number:064x}", created_at=float(number // 2)))
    found, cursor = [], None
    while True:
        page, cursor = await store.page(limit=2, cursor=cursor)
        found += [record.id for record in page]
        if cursor is None:
            break
    assert found == ["tok-4", "tok-3", "tok-2", "tok-1", "tok-0"]
