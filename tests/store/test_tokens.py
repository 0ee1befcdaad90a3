from __future__ import annotations

import pytest

from carrel.errors import AlreadyExists
from carrel.store import Database
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
