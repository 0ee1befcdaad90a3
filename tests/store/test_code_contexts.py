from __future__ import annotations

from dataclasses import replace

from tests.support.records import SESSION

from carrel.models import State
from carrel.store import Database, SessionStore
from carrel.store.code_contexts import CodeContextStore


async def test_kept_until_forgotten_or_the_session_ends(database: Database) -> None:
    store, sessions = CodeContextStore(database), SessionStore(database)
    await sessions.insert(SESSION)
    await sessions.insert(replace(SESSION, id="sbx-2", context_id="other"))
    await store.put(SESSION.id, "a", "one")
    await store.put(SESSION.id, "a", "two")
    await store.put("sbx-2", "a", "three")
    assert await store.environment(SESSION.id, "a") == "two"
    assert await store.environment("sbx-2", "a") == "three"
    assert await store.environment(SESSION.id, "b") is None
    await store.put(SESSION.id, "a", None)
    await store.put(SESSION.id, "a", None)
    assert await store.environment(SESSION.id, "a") is None
    await sessions.update("sbx-2", state=State.TERMINATED)
    await store.put(SESSION.id, "b", "one")
    assert await store.environment("sbx-2", "a") is None
