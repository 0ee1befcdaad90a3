"""The kernel's own figures agree with what the btrfs program says."""

from __future__ import annotations

import os

from tests.support.volumes import stored_bytes

from carrel.workspaces.volumes import BtrfsDriver, btrfs_ioctls, quota
from carrel.workspaces.volumes.btrfs_pool import run


def test_usage_and_limit_are_those_of_the_program(make) -> None:  # type: ignore[no-untyped-def]
    driver = make("btrfs")
    assert isinstance(driver, BtrfsDriver)
    for name, cap in (("a", 50 << 20), ("b", None)):
        driver.create(name, cap)
        with open(os.path.join(driver.path(name), "f"), "wb") as file:
            file.write(os.urandom(3 << 20))
        stored_bytes(driver)  # everything is committed
        line = run("btrfs", "qgroup", "show", "--raw", "-r", "-f", driver.path(name)).decode().splitlines()[-1].split()
        limit = int(line[3]) if line[3].isdigit() else None
        assert limit == cap
        fd = os.open(driver.path(name), os.O_RDONLY)
        try:
            assert quota.referenced(fd) == (int(line[1]), limit)
            assert line[0] == f"0/{btrfs_ioctls.number_of(fd)}"
        finally:
            os.close(fd)
