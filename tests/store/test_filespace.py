from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace

import pytest
from sqlalchemy import ColumnElement, Double, literal

from carrel.errors import InvalidRequest
from carrel.store import Database, FilespaceChange, FilespaceEntry, FilespaceMark, FilespaceStore

WRITE = FilespaceChange("a.txt", "00", 5, 0o644)


@pytest.fixture
def store(database: Database) -> FilespaceStore:
    return FilespaceStore(database)


async def live(store: FilespaceStore, context: str = "c") -> list[str]:
    return [entry.path for entry in (await store.page(context, limit=1000))[0]]


async def test_a_write_a_deletion_and_what_it_deleted(store: FilespaceStore) -> None:
    assert (await store.put("c", [])).entries == []
    done = await store.put("c", [WRITE])
    (entry,) = done.entries
    assert done.before == 0 and (entry.version, entry.hash, entry.size, entry.mode) == (1, "00", 5, 0o644)
    assert await store.get("c", "a.txt") == entry and await store.get("d", "a.txt") is None
    version, now = await store.newest("c")
    assert version == 1 and abs(now - entry.updated_at) < 60
    (gone,) = (await store.put("c", [FilespaceChange("a.txt")])).entries
    assert gone == replace(entry, deleted=True, version=2, updated_at=gone.updated_at)
    assert (await store.put("c", [FilespaceChange("a.txt"), FilespaceChange("absent")])).entries == []
    assert (await store.put("c", [WRITE, replace(WRITE, hash="01")])).entries[0].hash == "01"


async def test_a_deletion_may_expect_a_version(store: FilespaceStore) -> None:
    await store.put("c", [WRITE])
    await store.put("c", [replace(WRITE, hash="01")])
    assert (await store.put("c", [FilespaceChange("a.txt", expected=1)])).entries == []
    assert await live(store) == ["a.txt"]
    assert len((await store.put("c", [FilespaceChange("a.txt", expected=2)])).entries) == 1
    assert await live(store) == []


async def test_the_time_of_a_path_never_goes_back(database: Database) -> None:
    times = iter([100.0, 50.0, 50.0, 200.0])

    def clock() -> ColumnElement[float]:
        return literal(next(times), Double)

    store = FilespaceStore(database, clock)
    stamps = [(await store.put("c", [WRITE])).entries[0].updated_at for _ in range(4)]
    assert stamps == sorted(set(stamps)) and stamps[0] == 100.0 and 100 < stamps[2] < 101 and stamps[3] == 200.0


async def test_a_mark_is_stored_with_changes_and_is_no_file(store: FilespaceStore) -> None:
    for number in (1, 2):
        done = await store.put("c", [WRITE], FilespaceMark("\0me", "token", number))
        assert [entry.path for entry in done.entries] == ["a.txt"]
        assert (done.before, done.newest) == (2 * number - 2, 2 * number) == (done.before, (await store.newest("c"))[0])
    mark = (await store.changed("c"))[-1]
    assert (mark.path, mark.hash, mark.size, mark.deleted, mark.version) == ("\0me", "token", 2, True, 4)
    assert await live(store) == ["a.txt"] and await store.size("c") == (1, 5) and await store.hashes("c") == {"00"}
    assert (await store.put("c", [], FilespaceMark("\0me", "token", 3))).newest == 5


@pytest.mark.parametrize("others", [0, 20])
async def test_files_always_form_a_tree(store: FilespaceStore, others: int) -> None:
    """Whether few paths are looked for or all are read."""

    def writes(*paths: str) -> list[FilespaceChange]:
        unlike = (f"z{secrets.token_hex(4)}" for _ in range(others))
        return [replace(WRITE, path=path) for path in (*paths, *unlike)]

    async def now() -> list[str]:
        return [path for path in await live(store) if not path.startswith("z")]

    await store.put("c", writes("d/x", "d/y/z", "d0", "d-", "e"))
    done = await store.put("c", writes("d"))
    assert {entry.path for entry in done.entries if entry.deleted} == {"d/x", "d/y/z"}
    assert await now() == ["d", "d-", "d0", "e"]
    done = await store.put("c", writes("d/y/z/w"))
    assert [entry.path for entry in done.entries if entry.deleted] == ["d"]
    await store.put("c", writes("d", "d/k"))
    assert await now() == ["d-", "d/k", "d/y/z/w", "d0", "e"]
    await store.put("c", [*writes("d"), FilespaceChange("d/k", expected=1)])
    assert await now() == ["d", "d-", "d0", "e"]


async def test_changes_in_the_order_of_versions(store: FilespaceStore) -> None:
    await store.put("c", [replace(WRITE, path=f"f{number}") for number in range(1200)])
    await store.put("c", [replace(WRITE, path="f3", hash="03")])
    await store.put("d", [WRITE])
    assert await store.size("c") == (1200, 6000)
    assert await store.size("nobody") == (0, 0)
    assert await store.hashes("c") == {"00", "03"} and await store.hashes("nobody") == set()
    last = await store.changed("c", after=1199)
    assert [(entry.path, entry.version) for entry in last] == [("f1199", 1200), ("f3", 1201)]
    assert [entry.version for entry in await store.changed("c", limit=4)] == [1, 2, 3, 5]
    await store.forget("c")
    assert await store.changed("c") == [] and len(await store.changed("d")) == 1


async def test_pages_in_the_order_of_paths(store: FilespaceStore) -> None:
    paths = ["data/a", "data/b\udcff", "data/ü", "datb", "x"]
    await store.put("c", [replace(WRITE, path=path) for path in reversed(paths)])
    await store.put("c", [replace(WRITE, path="data/gone"), replace(WRITE, path="y")])
    await store.put("c", [FilespaceChange("data/gone"), FilespaceChange("y")])
    seen: list[str] = []
    cursor = None
    while True:
        found, cursor = await store.page("c", limit=2, cursor=cursor)
        seen += [entry.path for entry in found]
        if cursor is None:
            break
    assert seen == paths
    assert [entry.path for entry in (await store.page("c", prefix="data/", limit=9))[0]] == paths[:3]
    assert [entry.path for entry in (await store.page("c", prefix="data/b\udcff", limit=9))[0]] == paths[1:2]
    for wrong in ("!", "a", "€"):
        with pytest.raises(InvalidRequest) as caught:
            await store.page("c", limit=1, cursor=wrong)
        assert caught.value.field == "cursor"


async def test_any_path_is_kept_exactly(store: FilespaceStore) -> None:
    paths = ["new\nline", "not\udcff\udcfeutf8", "ü" * 2000, "x" * 4000, " ", "💡", "A", "a"]
    await store.put("c", [replace(WRITE, path=path) for path in paths])
    assert {entry.path for entry in await store.changed("c")} == set(paths)
    for path in paths:
        found = await store.get("c", path)
        assert found is not None and found.path == path


async def test_a_version_is_never_used_again(store: FilespaceStore) -> None:
    await store.put("c", [replace(WRITE, path=name) for name in ("x", "y")])
    await store.put("c", [FilespaceChange(name) for name in ("x", "y")])
    assert await store.forget_tombstones("c", 3600.0) == 0
    assert await store.forget_tombstones("c", -3600.0) == 1
    assert (await store.put("c", [replace(WRITE, path="z")])).entries[0].version == 5


async def test_writers_at_once(where: str) -> None:
    databases = [await Database.open(where), await Database.open(where)]
    try:
        stores = [FilespaceStore(database) for database in databases]
        work = [
            stores[number % 2].put("c", [replace(WRITE, path=f"f{number % 5}", size=number)]) for number in range(40)
        ]
        made: list[FilespaceEntry] = [entry for done in await asyncio.gather(*work) for entry in done.entries]
        assert sorted(entry.version for entry in made) == list(range(1, 41))
        last = {entry.path: entry for entry in sorted(made, key=lambda entry: entry.version)}
        assert {entry.path: entry for entry in await stores[0].changed("c")} == last
        for path in last:
            stamps = [entry.updated_at for entry in sorted(made, key=lambda e: e.version) if entry.path == path]
            assert stamps == sorted(set(stamps))
    finally:
        for database in databases:
            await database.close()
