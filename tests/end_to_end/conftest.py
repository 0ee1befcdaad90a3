"""Servers and commands are forked from a process that has carrel imported; `test_install` starts the real ones."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator

import pytest
from tests.support.nats import NatsServer
from tests.support.postgres import Postgres
from tests.support.servers import ROOT, Server


@pytest.fixture(scope="session", autouse=True)
def _forked(carrel_forks: None) -> None: ...


@pytest.fixture(params=["sqlite", "postgresql"])
async def database(request: pytest.FixtureRequest) -> AsyncIterator[str | None]:
    """The URL of a database for one server; None for its own file."""
    if request.param == "sqlite":
        yield None
        return
    postgres: Postgres = request.getfixturevalue("postgres")
    schema = f"e{os.urandom(8).hex()}"
    await postgres.execute(f"CREATE SCHEMA {schema}")
    yield postgres.url(search_path=schema)
    await postgres.execute(f"DROP SCHEMA {schema} CASCADE")


@pytest.fixture(params=["nats", "no bus"])
def bus(request: pytest.FixtureRequest) -> Iterator[NatsServer | None]:
    """A NATS server of the test, or None."""
    if request.param == "no bus":
        yield None
        return
    server = NatsServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def scientific(request: pytest.FixtureRequest) -> Server:
    """A server with a template of real packages. Code runs the same for root and an ordinary user: one has it all. What
    code must not reach is tried with both, in `tests/security/test_python.py`.
    """
    server: Server = request.getfixturevalue("science_as_root" if ROOT else "science_as_user")
    return server
