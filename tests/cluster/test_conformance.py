"""The conformance suite on pods."""

from __future__ import annotations

import pytest

from carrel.testing import Harness, parameters, run_check, workspaces_in

# Pods take a second to start and to end, so checks are given longer.
DEADLINE_S = 180


@pytest.fixture(scope="session", params=["runc", "gvisor"])
def pods(request, grounds):
    return grounds(gvisor_class={"runc": "", "gvisor": "gvisor"}[request.param])


@pytest.fixture
async def harness(pods):
    found = Harness(pods.provider, workspaces_in(str(pods.volume)))
    assert found.provider.missing() is None
    yield found
    await found.close()
    assert pods.left() == []


@pytest.mark.parametrize(**parameters())
async def test_promise(check, harness):
    outcome = await run_check(check, harness, DEADLINE_S)
    assert outcome.kept, outcome.failure
