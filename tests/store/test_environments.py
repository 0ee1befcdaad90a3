from __future__ import annotations

from dataclasses import replace

from tests.support.records import SESSION

from carrel.models import State
from carrel.store import Database, SessionStore
from carrel.store.environments import EnvironmentRecord, EnvironmentStore

ONE = EnvironmentRecord(
    "n1", "h1", "3.11.2", "/usr/bin/python3.11", ["a"], [{"name": "a", "version": "1"}], ["a"], 10, 1.0, 1.0, "c"
)
BUILDER = replace(SESSION, acts_for="x")


async def test_kept_labelled_and_forgotten(database: Database) -> None:
    store, other = EnvironmentStore(database, "a"), EnvironmentStore(database, "b")
    await store.put(ONE)
    await store.put(replace(ONE, size=20))
    await store.put(replace(ONE, name="n2", last_used_at=5.0))
    await store.label("data", "n2")
    await store.label("data", "n1")
    found = await store.all()
    assert [each.name for each in found] == ["n2", "n1"] and found[1].size == 20
    assert [each.labels for each in found] == [[], ["data"]]
    assert await other.all() == []
    await store.answered("k1", "n2")
    await store.answered("k1", "n1")
    await store.answered("k2", "n2")
    assert await store.answers() == {"k1": "n1", "k2": "n2"} and await other.answers() == {}
    await store.used("n1", 9.0)
    assert [each.name for each in await store.all()] == ["n1", "n2"]
    await store.forget(["n1", "absent"])
    assert [each.name for each in await store.all()] == ["n2"]
    assert await store.answers() == {"k2": "n2"}


async def test_what_a_context_has_on_another_server(database: Database) -> None:
    store, other = EnvironmentStore(database, "a"), EnvironmentStore(database, "b")
    await store.put(ONE)
    await store.put(replace(ONE, name="n2", requirements=["b"], python="3.12.1"))
    await store.label("data", "n2")
    for name in ("n1", "n2"):
        await store.used(name, 9.0, "c")
    assert await other.had_elsewhere("c", "n1") == (["a"], "3.11.2")
    assert await other.had_elsewhere("c", "data") == (["b"], "3.12.1")
    assert await other.had_elsewhere("c", "n3") is None
    assert await other.had_elsewhere("d", "n1") is None, "only what the context itself has"
    assert await store.had_elsewhere("c", "n1") is None, "here it would be known"


async def test_held_until_the_session_is_terminated(database: Database) -> None:
    store, sessions = EnvironmentStore(database, "a"), SessionStore(database)
    await sessions.insert(BUILDER)
    found = await sessions.get("sbx-1")
    assert found is not None and found.acts_for == "x"
    await store.put(ONE)
    await store.used("n1", 9.0, "c")
    await store.used("n1", 9.0, "c")
    await store.used("n1", 9.0, "nobody")
    assert await store.held() == {"n1": {"c"}}, "who has no session holds nothing"
    await store.copy_uses("c", "fork")
    await store.copy_uses("c", "fork")
    assert await store.holds("fork") == ["n1"]
    await sessions.insert(replace(BUILDER, id="sbx-2", context_id="fork"))
    await sessions.update("sbx-1", state=State.STOPPED)
    assert await store.held() == {"n1": {"c", "fork"}}
    assert await store.release("fork", "n1") and not await store.release("fork", "n1")
    await sessions.update("sbx-1", state=State.TERMINATED)
    await sessions.update("sbx-2", state=State.TERMINATED)
    assert await store.held() == {}
