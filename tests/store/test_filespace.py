from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from carrel.store import Database, FilespaceEntry, FilespaceStore

BASE = FilespaceEntry("c", "a.txt", "blake3:00", 5, 0o644, 10.0)


@pytest.fixture
def store(database: Database) -> FilespaceStore:
    return FilespaceStore(database)


async def test_the_newer_stays(store: FilespaceStore) -> None:
    assert await store.put("c", []) == []
    assert await store.put("c", [BASE]) == [replace(BASE, version=1)]
    for not_newer in (BASE, replace(BASE, updated_at=9.0, size=1), replace(BASE, updated_at=10.0, deleted=True)):
        assert await store.put("c", [not_newer]) == []
    gone = replace(BASE, updated_at=11.0, deleted=True, hash=None, size=0)
    assert await store.put("c", [replace(gone, updated_at=10.5), gone]) == [replace(gone, version=2)]
    assert await store.get("c", "a.txt") == replace(gone, version=2)
    assert await store.get("d", "a.txt") is None
    with pytest.raises(ValueError, match="another context"):
        await store.put("d", [BASE])


async def test_changes_in_the_order_of_versions(store: FilespaceStore) -> None:
    await store.put("c", [replace(BASE, path=f"f{number}") for number in range(1200)])
    await store.put("c", [replace(BASE, path="f3", updated_at=20.0)])
    await store.put("d", [replace(BASE, context_id="d")])
    assert await store.size("c") == (1200, 6000)
    assert await store.size("nobody") == (0, 0)
    last = await store.changed("c", after=1199)
    assert [(entry.path, entry.version) for entry in last] == [("f1199", 1200), ("f3", 1201)]
    assert [entry.version for entry in await store.changed("c", limit=3)] == [1, 2, 3]
    await store.forget("c")
    assert await store.changed("c") == [] and len(await store.changed("d")) == 1


async def test_any_path_is_kept_exactly(store: FilespaceStore) -> None:
    paths = ["new\nline", "not\udcff\udcfeutf8", "ü" * 2000, "x" * 4000, " ", "💡", "A", "a"]
    await store.put("c", [replace(BASE, path=path) for path in paths])
    assert {entry.path for entry in await store.changed("c")} == set(paths)
    for path in paths:
        found = await store.get("c", path)
        assert found is not None and found.path == path


async def test_a_version_is_never_used_again(store: FilespaceStore) -> None:
    await store.put("c", [replace(BASE, path=name, deleted=True) for name in ("x", "y")])
    assert await store.forget_tombstones("c", 10.0) == 0
    assert await store.forget_tombstones("c", 10.5) == 1
    assert await store.put("c", [replace(BASE, path="z")]) == [replace(BASE, path="z", version=3)]


async def test_writers_at_once(where: str) -> None:
    databases = [await Database.open(where), await Database.open(where)]
    try:
        stores = [FilespaceStore(database) for database in databases]
        work = [
            stores[number % 2].put("c", [replace(BASE, path=f"f{number % 5}", updated_at=float(number))])
            for number in range(40)
        ]
        versions = [entry.version for done in await asyncio.gather(*work) for entry in done]
        assert sorted(versions) == list(range(1, len(versions) + 1))
        newest = {entry.path: entry.updated_at for entry in await stores[0].changed("c")}
        assert newest == {f"f{number}": 35.0 + number for number in range(5)}
    finally:
        for database in databases:
            await database.close()
