"""Tests of the whole product: real server processes, real clients, real kills."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.kill_load import Tally
from tests.support.postgres import Postgres

_TALLY = pytest.StashKey[Tally]()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One database server for these tests."""
    server = Postgres()
    yield server
    server.close()


@pytest.fixture(scope="session")
def tally(pytestconfig: pytest.Config) -> Tally:
    """What the kills of this run came to; shown at the end."""
    return pytestconfig.stash.setdefault(_TALLY, Tally())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Show where the kills landed."""
    if (tally := config.stash.get(_TALLY, None)) is not None:
        terminalreporter.write_line(str(tally))
