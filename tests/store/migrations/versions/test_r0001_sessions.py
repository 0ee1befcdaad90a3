from __future__ import annotations

import sqlite3

import asyncpg
import pytest

from carrel.models import State
from carrel.store import Database, LeaseStore, SessionRecord, SessionStore

# What the release without migrations made.
FIRST = """
CREATE TABLE sessions (
    id VARCHAR(64) NOT NULL, context_id VARCHAR(128), ephemeral BOOLEAN NOT NULL, state VARCHAR(32) NOT NULL,
    provider VARCHAR(64) NOT NULL, isolation_level INTEGER NOT NULL, unsafe BOOLEAN NOT NULL, trust VARCHAR(16) NOT NULL,
    network VARCHAR(16) NOT NULL, limits JSON NOT NULL, env JSON NOT NULL, labels JSON NOT NULL, handle JSON,
    idempotency_key VARCHAR(255), created_at DOUBLE PRECISION NOT NULL, last_activity_at DOUBLE PRECISION NOT NULL,
    error TEXT, end_reason TEXT, PRIMARY KEY (id)
);
CREATE UNIQUE INDEX sessions_idempotency_key ON sessions (idempotency_key);
CREATE INDEX sessions_state ON sessions (state);
CREATE INDEX sessions_page ON sessions (created_at, id);
CREATE UNIQUE INDEX sessions_context ON sessions (context_id) WHERE state != 'terminated';
INSERT INTO sessions VALUES ('sbx-1', 'c1', false, 'creating', 'namespace', 1, false, 'medium', 'none',
    '{"memory_mb": 64}', '{"A": "b"}', '{"team": "x"}', NULL, NULL, 1.5, 2.5, NULL, NULL);
"""


@pytest.fixture
async def first(where: str, kind: str) -> str:
    if kind == "sqlite":
        connection = sqlite3.connect(where)
        connection.executescript(FIRST)
        connection.close()
    else:
        client = await asyncpg.connect(where)
        await client.execute(FIRST)
        await client.close()
    return where


async def test_a_database_without_migrations_is_adopted(first: str, base: SessionRecord) -> None:
    for owner in ("a", "b"):
        database = await Database.open(first)
        store, leases = SessionStore(database), LeaseStore(database)
        record = await store.get("sbx-1")
        assert record is not None and (record.limits, record.labels) == (base.limits, base.labels)
        fence = await leases.acquire("sbx-1", owner, 0)
        await store.update("sbx-1", fence=fence, state=State.RUNNING)
        await database.close()
    assert fence == 2
