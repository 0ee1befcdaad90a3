"""The audit log on SQLite and on PostgreSQL, with real keys."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.postgres import Postgres

from carrel.audit import SigningKey
from carrel.store import Database
from carrel.store.audit import AuditStore
from carrel.store.batches import BatchesHere


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
def store(database: Database) -> AuditStore:
    return AuditStore(database, BatchesHere(database))


@pytest.fixture(scope="session")
def key(tmp_path_factory: pytest.TempPathFactory) -> SigningKey:
    return SigningKey.load(str(tmp_path_factory.mktemp("key")))
