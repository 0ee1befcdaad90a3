"""What the tests of policy share: real shells in a root of stubs, and the documents of the examples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.real_shell import RealShell

from carrel.policy.documents import settings, sources
from carrel.policy.rules.layers import Layer, Policy

EXAMPLES = Path(__file__).parent / "examples"


@pytest.fixture(scope="session")
def real_shell() -> Iterator[RealShell]:
    """Real shells that can run nothing but stubs."""
    shell = RealShell()
    yield shell
    shell.close()


@pytest.fixture(scope="session")
def example() -> Policy:
    """The policy of the two example documents."""
    rules = settings.load((EXAMPLES / "settings.json").read_text())
    resources = sources.load((EXAMPLES / "sources.json").read_text())
    return Policy.of([Layer("settings.json", rules, resources)], context_id="ctx-1")
