"""Tests of the whole product: real server processes, real clients, real kills."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.postgres import Postgres


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One database server for these tests."""
    server = Postgres()
    yield server
    server.close()
