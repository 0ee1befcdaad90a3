"""The cgroups of sandboxes whose processes are found by them."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from carrel.isolation import probe
from carrel.providers import groups
from carrel.providers.groups import SandboxGroups


def test_groups_that_are_made_at_once_share_one_parent():
    if "memory" not in probe.host().controllers:
        pytest.skip("no cgroup for memory can be made")
    made, names = SandboxGroups(), [f"at-once-{number}" for number in range(8)]
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: made.make(name, 64, None), names))
        parents = {os.path.dirname(path) for name in names for path, _ in groups.find(name)}
        hierarchies = {os.path.dirname(parent) for parent in parents}
        assert parents and len(parents) == len(hierarchies)
    finally:
        for name in names:
            made.end(name)
        made.close()
