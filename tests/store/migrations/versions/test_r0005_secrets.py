from __future__ import annotations

from carrel.store import Database, SecretStore


async def test_what_it_adds(migrated: Database) -> None:
    store = SecretStore(migrated)
    info = await store.put("context", "c", "A", sealed=b"x", key_id="k")
    assert await store.list("context", "c") == [info]
