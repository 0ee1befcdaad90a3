"""The table of rights is what a server uses: not less, and not more."""

from __future__ import annotations

from carrel.models import Network
from carrel.providers.base import Launch
from carrel.providers.kubernetes.rights import RIGHTS
from carrel.testing import Harness, workspaces_in


async def test_the_rights_of_the_table_are_those_that_are_used(grounds, cluster) -> None:
    pooled = grounds(warm_pool=1)
    harness = Harness(pooled.provider, workspaces_in(str(pooled.volume)))
    launch = harness.launch(memory_mb=256)
    handle = await harness.provider.start(launch)  # claimed from a warm pool
    again = pooled.provider()
    assert await again.running() == [launch.id]
    assert await again.alive(handle)
    assert not await again.alive({**handle, "id": "another"})
    await again.remove(handle)
    await again.start_slot(Launch("slot", "", Network.NONE, memory_mb=256))
    await again.close()  # removes it and the pools
    await harness.close()
    cold = pooled.with_options(warm_pool=0).provider()
    launch = harness.launch(memory_mb=256)
    handle = await cold.start(launch)
    assert await cold.running() == [launch.id]
    await cold.remove(handle)
    await cold.close()
    used = {
        (each["objectRef"].get("apiGroup", ""), each["objectRef"]["resource"], each["verb"])
        for each in cluster.audited()
        if each["user"]["username"] == f"system:serviceaccount:{pooled.name}:carrel" and "resource" in each["objectRef"]
    }
    known = {(right.group, kind, verb) for right in RIGHTS for kind in right.resources for verb in right.verbs}
    assert used == known
