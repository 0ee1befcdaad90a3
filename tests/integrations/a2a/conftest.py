"""A place for each test: a context with a policy, and agents that work in it."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.support.a2a_ground import POLICY, Ground
from tests.support.fork_server import AGENT, forking

from carrel.client import AsyncClient
from carrel.errors import NotFound


@pytest.fixture(scope="session")
def agents_fork() -> Iterator[None]:
    """Agents in processes of their own are forked: a fresh interpreter imports for two seconds."""
    with forking(AGENT):
        yield


@pytest.fixture
async def ground(server: dict[str, str], owner: AsyncClient, tmp_path: Path) -> AsyncIterator[Ground]:
    """A place for one test."""
    name = f"a2a-{uuid.uuid4().hex[:12]}"
    await owner.policy(name).put(settings=POLICY)
    agent = await owner.tokens.create(f"agent-{name}", kind="agent", scopes=["operate"])
    person = await owner.tokens.create(f"person-{name}", kind="person", scopes=["approve"])
    async with AsyncClient(server["url"], person.token) as other:
        ground = Ground(server["url"], name, agent.token, other, owner, person.token, tmp_path)
        yield ground
        await ground.close()
    try:
        await owner.attach(await owner.find(name)).terminate(delete_files=True)
    except NotFound:
        pass
