"""Both drivers, each on storage of its own that is gone after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from carrel.workspaces.volumes import BtrfsDriver, DirectoryDriver, VolumeDriver

Make = Callable[[str], VolumeDriver]


def _btrfs(path: Path) -> BtrfsDriver:
    driver = BtrfsDriver(str(path), pool_bytes=256 << 20, pool_max_bytes=1 << 30)
    reason = driver.missing()
    if reason is not None:
        pytest.skip(reason)
    return driver


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes an open driver of a kind."""
    made: list[VolumeDriver] = []

    def one(kind: str) -> VolumeDriver:
        place = tmp_path / f"{kind}{len(made)}"
        driver = DirectoryDriver(str(place)) if kind == "directory" else _btrfs(place)
        driver.open()
        made.append(driver)
        return driver

    yield one
    for driver in made:
        driver.close()


@pytest.fixture(params=["directory", "btrfs"])
def driver(request: pytest.FixtureRequest, make: Make) -> VolumeDriver:
    """Each driver in turn."""
    return make(request.param)


@pytest.fixture
def directory(make: Make) -> VolumeDriver:
    """The directory driver."""
    return make("directory")
