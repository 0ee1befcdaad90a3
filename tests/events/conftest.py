"""The event log on SQLite and on PostgreSQL."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.support.postgres import Postgres

from carrel.events import EventLog
from carrel.store import Database
from carrel.store.events import EventStore


@pytest.fixture(params=["sqlite", "postgresql"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def where(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    if kind == "sqlite":
        yield str(tmp_path / "carrel.db")
        return
    postgres: Postgres = request.getfixturevalue("postgres")
    schema = f"t{uuid.uuid4().hex}"
    await postgres.execute(f"CREATE SCHEMA {schema}")
    yield postgres.url(search_path=schema)
    await postgres.execute(f"DROP SCHEMA {schema} CASCADE")


@pytest.fixture
async def database(where: str) -> AsyncIterator[Database]:
    database = await Database.open(where)
    yield database
    await database.close()


@pytest.fixture
async def store(database: Database) -> EventStore:
    store = EventStore(database)
    await store.open()
    return store


@pytest.fixture
async def another(where: str) -> AsyncIterator[Callable[[str], Awaitable[EventLog]]]:
    """Opens the log of one more server on the same database."""
    async with AsyncExitStack() as stack:

        async def opened(node: str) -> EventLog:
            database = await Database.open(where)
            stack.push_async_callback(database.close)
            log = EventLog(EventStore(database), node, keep_days=7, keep_bytes=2**30)
            await log.open()
            stack.push_async_callback(log.close)
            return log

        yield opened


@pytest.fixture
async def log(another: Callable[[str], Awaitable[EventLog]]) -> EventLog:
    return await another("a")
