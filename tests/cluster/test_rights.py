"""The table of rights is what a server uses: not less, and not more."""

from __future__ import annotations

import pytest

from carrel.providers.base import Launch
from carrel.providers.kubernetes.provider import KubernetesProvider
from carrel.providers.kubernetes.rights import RIGHTS
from carrel.testing import Harness, workspaces_in


async def used_once(provider: KubernetesProvider, launch: Launch, another: KubernetesProvider) -> None:
    """Start a sandbox, let two objects of its server find it, and remove it."""
    handle = await provider.start(launch)
    assert await provider.running() == [launch.id]
    assert await provider.alive(handle)
    assert await another.alive(handle)
    await provider.remove(handle)


@pytest.fixture(scope="session")
def watched(grounds):
    return grounds(warm_pool=1)


async def test_the_rights_of_the_table_are_those_that_are_used(watched, cluster) -> None:
    harness = Harness(watched.provider, workspaces_in(str(watched.volume)))
    # A second object of the same server, as after a kill. It finds the pool of the first, and changes it.
    both = (watched.provider(), watched.provider())
    for each in both:
        assert await each.running() == []
    for each in both:
        await used_once(each, harness.launch(memory_mb=256), both[0])
    for each in both:
        await each.close()
    without = watched.with_options(warm_pool=0)
    for other in (without, without.with_options(agent_sandbox=False)):
        provider = other.provider()
        await used_once(provider, harness.launch(memory_mb=256), provider)
        await provider.close()
    await harness.close()
    used = {
        (each["objectRef"].get("apiGroup", ""), each["objectRef"]["resource"], each["verb"])
        for each in cluster.audited()
        if each["user"]["username"] == f"system:serviceaccount:{watched.name}:carrel" and "objectRef" in each
    }
    # That a volume grows has its own test.
    needed = [right for right in RIGHTS if right.need != "growing volume"]
    known = {(right.group, kind, verb) for right in needed for kind in right.resources for verb in right.verbs}
    assert used == known
