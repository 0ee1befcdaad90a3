"""Claims of slots of Docker and gVisor by many clients, while slots are killed.

`CARREL_CLAIMS=500` makes that many, `CARREL_CLAIM_SEED=7` repeats an order of kills.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.dockerd import DockerDaemon
from tests.support.gvisor import find_runsc
from tests.support.slot_claims import many_claims

from carrel.config import load
from carrel.control.plane import ControlPlane

CLAIMS = int(os.environ.get("CARREL_CLAIMS", "16"))
SEED = int(os.environ.get("CARREL_CLAIM_SEED", "1"))


@pytest.mark.timeout(120 + 4 * CLAIMS)
@pytest.mark.parametrize("name", ["docker", "gvisor"])
async def test_many_claims_of_real_slots_while_they_are_killed(
    request: pytest.FixtureRequest, data_dir: str, name: str, record_property: Callable[[str, object], None]
) -> None:
    daemon: DockerDaemon | None = request.getfixturevalue("docker") if name == "docker" else None
    flags = {
        "data_dir": data_dir, "volumes": "directory", "max_sandboxes": 100, "sandbox.provider": name, "pool.size": 8,
        "pool.max": 8, "gvisor.runsc": find_runsc() or "", "docker.socket": daemon.socket if daemon else "/none",
    }  # fmt: skip
    plane = await ControlPlane.open(load(flags, environ={}))
    try:
        provider = plane.providers[name]
        if (missing := provider.missing()) is not None:
            pytest.skip(missing)
        shot, claimed = await many_claims(plane, provider, CLAIMS, SEED)
        record_property(f"claims of {name}", f"{CLAIMS} contexts, {claimed} slots claimed, {shot} killed")
    finally:
        await plane.close()
    assert daemon is None or daemon.objects() == []
    assert [path.name for path in Path(data_dir, "run").glob(f"{name}/*")] == []
