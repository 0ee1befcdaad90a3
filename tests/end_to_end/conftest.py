"""Servers and commands are forked from a process that has carrel imported; `test_install` starts the real ones."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _forked(carrel_forks: None) -> None: ...
