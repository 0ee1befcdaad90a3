"""Every test of the store runs on SQLite and on PostgreSQL."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.engine import Connection
from tests.support.postgres import Postgres

from carrel.models import Limits, Network, State, Trust
from carrel.store import Database, SessionRecord, SessionStore
from carrel.store.tables import metadata
from carrel.store.upgrades import upgrade


@pytest.fixture(params=["sqlite", "postgresql"])
def kind(request: pytest.FixtureRequest) -> str:
    """Which database."""
    return str(request.param)


@pytest.fixture
async def where(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """A path or URL of an empty database that is this test's alone."""
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
    """An open database."""
    database = await Database.open(where)
    yield database
    await database.close()


@pytest.fixture
async def migrated(where: str) -> AsyncIterator[Database]:
    """An open database whose tables every migration in turn has made, as an old one's."""

    def work(connection: Connection) -> None:
        metadata.drop_all(connection)
        connection.execute(text("DROP TABLE alembic_version"))
        upgrade(connection)

    database = await Database.open(where)
    await database.write(work)
    yield database
    await database.close()


@pytest.fixture
def store(database: Database) -> SessionStore:
    """Its sessions."""
    return SessionStore(database)


@pytest.fixture
def base() -> SessionRecord:
    """A record to vary."""
    return SessionRecord(
        id="sbx-1",
        context_id="c1",
        ephemeral=False,
        state=State.CREATING,
        provider="namespace",
        isolation_level=1,
        unsafe=False,
        trust=Trust.MEDIUM,
        network=Network.NONE,
        limits=Limits(memory_mb=64),
        created_at=1.5,
        last_activity_at=2.5,
        env={"A": "b"},
        labels={"team": "x"},
    )
