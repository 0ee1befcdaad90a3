from __future__ import annotations

from dataclasses import replace

import pytest

from carrel.errors import LimitExceeded
from carrel.store import Database
from carrel.store.mcp_servers import McpServerRecord, McpServerStore

ONE = McpServerRecord("c", "one", {"command": ["x"]}, "g1", 1.0, 1.0, environment="e", program="/workspace/p")


def anyway(_others: int) -> None:
    return


async def test_kept_changed_and_forgotten(database: Database) -> None:
    store = McpServerStore(database)
    assert await store.put(ONE, anyway) == ONE and await store.get("c", "one") == ONE
    assert await store.discovered("c", "one", "g1", {"tools": []}, None, 5.0)
    assert not await store.discovered("c", "one", "g0", {"tools": [1]}, None, 6.0), "of another declaration"
    again = await store.put(replace(ONE, generation="g2", created_at=9.0, updated_at=9.0), anyway)
    assert (again.created_at, again.updated_at, again.catalogue_generation) == (1.0, 9.0, "g1")
    assert again.catalogue == {"tools": []}, "what it offered stays until the new one was asked"
    assert await store.discovered("c", "one", "g2", None, "it died", 7.0)
    found = await store.get("c", "one")
    assert found is not None and (found.discovery_error, found.discovered_at) == ("it died", 5.0)
    assert await store.declared("c", "one") == replace(found, catalogue=None)
    await store.place(replace(found, environment="other"))
    await store.place(replace(found, environment="wrong", generation="g0"))
    placed = await store.get("c", "one")
    assert placed is not None and placed.environment == "other"
    assert await store.enable("c", "one", enabled=False) and not await store.enable("c", "two", enabled=False)
    assert await store.delete("c", "one") and not await store.delete("c", "one")
    assert await store.get("c", "one") is None and await store.declared("c", "one") is None


async def test_what_servers_say_can_be_kept(database: Database) -> None:
    store = McpServerStore(database)
    await store.put(ONE, anyway)
    await store.discovered("c", "one", "g1", {"tools": [{"name": "t", "description": "ü \ufffd"}]}, "no\0 \ud800", 5.0)
    found = await store.get("c", "one")
    assert found is not None and found.catalogue == {"tools": [{"name": "t", "description": "ü \ufffd"}]}
    assert found.discovery_error == "no\ufffd \ufffd"


async def test_room_is_asked_for_in_the_same_moment(database: Database) -> None:
    store = McpServerStore(database)
    told: list[int] = []

    def room(others: int) -> None:
        told.append(others)
        if others >= 2:
            raise LimitExceeded("full")

    for name in ("one", "two", "one"):
        await store.put(replace(ONE, name=name), room)
    with pytest.raises(LimitExceeded):
        await store.put(replace(ONE, name="three"), room)
    await store.put(replace(ONE, name="three", context_id="d"), room)
    assert told == [0, 1, 1, 2, 0]
    assert [each.name for each in await store.list("c")] == ["one", "two"]


async def test_a_fork_has_the_servers_of_its_origin(database: Database) -> None:
    store = McpServerStore(database)
    await store.put(ONE, anyway)
    await store.put(replace(ONE, context_id="d", name="old"), anyway)
    await store.copy("c", "d")
    assert [(each.name, each.generation) for each in await store.list("d")] == [("one", "g1")]
    await store.delete("d", "one")
    assert len(await store.list("c")) == 1
    await store.forget("c")
    assert await store.list("c") == []
