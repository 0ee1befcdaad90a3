from __future__ import annotations

import asyncio

import pytest

from carrel.errors import Conflict
from carrel.store import Database
from carrel.store.policies import PolicyStore


async def test_a_policy_is_replaced_whole_and_counted(database: Database) -> None:
    store = PolicyStore(database)
    assert await store.get("c") is None
    assert await store.put("c", {"a": [1]}, None, by="ann", at=1.0) == 1
    assert await store.put("c", None, {"b": "é"}, by="bob", at=2.0, expected=1) == 2
    found = await store.get("c")
    assert found is not None
    assert (found.settings, found.sources, found.version, found.updated_by) == (None, {"b": "é"}, 2, "bob")
    with pytest.raises(Conflict, match="changed meanwhile"):
        await store.put("c", None, None, by="ann", at=3.0, expected=1)
    assert not await store.delete("c", version=1)
    assert await store.delete("c", version=2)
    assert not await store.delete("c")


async def test_of_two_editors_one_wins(database: Database) -> None:
    store = PolicyStore(database)
    tries = [store.put("c", {"n": number}, None, by="x", at=1.0, expected=0) for number in range(6)]
    results = await asyncio.gather(*tries, return_exceptions=True)
    assert results.count(1) == 1
    assert sum(isinstance(result, Conflict) for result in results) == 5
