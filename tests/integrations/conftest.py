"""A real server, real tokens, and a context with a policy for each test."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.support.langgraph_ground import POLICY, Ground, Nursery, Served
from tests.support.postgres import Postgres

from carrel.client import AsyncClient
from carrel.errors import NotFound


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, carrel_forks: None) -> Iterator[dict[str, str]]:
    """Where a server listens, the token of its owner, and a directory whose folders may be workspaces."""
    served = Served(tmp_path_factory.mktemp("server") / "data")
    yield {"url": served.url, "token": served.token, "folders": str(served.folders)}
    served.close()


@pytest.fixture
async def owner(server: dict[str, str]) -> AsyncIterator[AsyncClient]:
    """A client that may do everything."""
    async with AsyncClient(server["url"], server["token"]) as client:
        yield client


@pytest.fixture
async def ground(server: dict[str, str], owner: AsyncClient) -> AsyncIterator[Ground]:
    """A place for one test."""
    name = f"graph-{uuid.uuid4().hex[:12]}"
    await owner.policy(name).put(settings=POLICY)
    agent = await owner.tokens.create(f"agent-{name}", kind="agent", scopes=["operate"])
    person = await owner.tokens.create(f"person-{name}", kind="person", scopes=["approve"])
    async with AsyncClient(server["url"], agent.token) as one, AsyncClient(server["url"], person.token) as other:
        yield Ground(server["url"], name, agent.token, owner, one, other)
    try:
        await owner.attach(await owner.find(name)).terminate(delete_files=True)
    except NotFound:
        pass


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Where agents come from."""
    found = Nursery()
    yield found
    found.close()


@pytest.fixture(params=["sqlite", "postgresql"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """An empty database for checkpoints."""
    if request.param == "sqlite":
        yield str(tmp_path / "checkpoints.db")
        return
    postgres: Postgres = request.getfixturevalue("postgres")
    schema = f"t{uuid.uuid4().hex}"
    await postgres.execute(f"CREATE SCHEMA {schema}")
    yield postgres.url(options=f"-csearch_path={schema}")
    await postgres.execute(f"DROP SCHEMA {schema} CASCADE")
