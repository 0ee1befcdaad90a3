"""Servers and commands are forked from a process that has carrel imported; `test_install` starts the real ones."""

from __future__ import annotations

import pytest
from tests.support.servers import ROOT, Server


@pytest.fixture(scope="session", autouse=True)
def _forked(carrel_forks: None) -> None: ...


@pytest.fixture(scope="session")
def scientific(request: pytest.FixtureRequest) -> Server:
    """A server with a template of real packages. Code runs the same for root and an ordinary user: one has it all. What
    code must not reach is tried with both, in `tests/security/test_python.py`.
    """
    server: Server = request.getfixturevalue("science_as_root" if ROOT else "science_as_user")
    return server
