"""A real server, real tokens, and a context with a policy for each test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "store"))

from a2a_ground import POLICY, Ground
from postgres import Postgres

from carrel.client import AsyncClient
from carrel.errors import NotFound


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Where a server listens, and the token of its owner."""
    directory = tmp_path_factory.mktemp("server") / "data"
    command = [sys.executable, "-m", "carrel", "serve", "--port", "0", "--data-dir", str(directory)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("CARREL_")}
    with (directory.parent / "server.log").open("ab") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    deadline = time.monotonic() + 30
    while not (directory / "server.json").exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            pytest.fail("the server did not start:\n" + (directory.parent / "server.log").read_text())
        time.sleep(0.02)
    url = json.loads((directory / "server.json").read_bytes())["url"]
    yield {"url": url, "token": (directory / "token").read_text().strip()}
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    finally:
        process.kill()
        process.wait()


@pytest.fixture
async def owner(server: dict[str, str]) -> AsyncIterator[AsyncClient]:
    """A client that may do everything."""
    async with AsyncClient(server["url"], server["token"]) as client:
        yield client


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


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One database server for these tests."""
    found = Postgres()
    yield found
    found.close()


@pytest.fixture(params=["sqlite", "postgresql"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """An empty database for tasks and checkpoints."""
    if request.param == "sqlite":
        yield str(tmp_path / "agent.db")
        return
    postgres: Postgres = request.getfixturevalue("postgres")
    schema = f"t{uuid.uuid4().hex}"
    await postgres.execute(f"CREATE SCHEMA {schema}")
    yield postgres.url(options=f"-csearch_path={schema}")
    await postgres.execute(f"DROP SCHEMA {schema} CASCADE")
