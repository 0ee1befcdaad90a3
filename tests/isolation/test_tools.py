from __future__ import annotations

from pathlib import Path

from carrel.isolation.rootfs import UV
from carrel.isolation.tools import find_uv, shared_tools


def test_uv_of_the_host_is_shared():
    found = find_uv()
    assert found is not None and shared_tools()[UV] == found
    assert all(Path(place).exists() for place in shared_tools().values())
