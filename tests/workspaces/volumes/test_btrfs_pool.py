"""Pools are found, and what is not carrel's is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.volumes import unmount

from carrel.errors import PlatformError
from carrel.workspaces.volumes.btrfs_pool import Pool, missing_programs, mounted_at, run


def test_a_program_that_fails_is_quoted() -> None:
    with pytest.raises(PlatformError, match="No such file"):
        run("ls", "/nowhere")
    with pytest.raises(PlatformError, match="cannot run"):
        run("no-such-program-here", "x")


def test_mounts_are_found_by_their_exact_place() -> None:
    assert mounted_at("/proc") is not None
    assert mounted_at("/proc/self") is None


def test_a_pool_left_mounted_is_taken_over(tmp_path: Path) -> None:
    if (reason := missing_programs()) is not None:
        pytest.skip(reason)
    place = tmp_path / "with space"
    pools = [Pool(str(tmp_path / "pool file"), str(place), 0, 0) for _ in range(2)]
    pools[0].open()
    (place / "kept").touch()
    pools[1].open()
    assert (place / "kept").exists()
    pools[1].close()
    assert mounted_at(str(place)) is None


def test_what_is_mounted_by_others_is_not_touched(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    place = tmp_path / "pool"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(place)], check=True)
    try:
        with pytest.raises(PlatformError, match="another file system is mounted"):
            Pool(str(tmp_path / "pool.btrfs"), str(place), 0, 0).open()
        assert mounted_at(str(place)) == ("tmpfs", "tmpfs")
    finally:
        unmount(str(place))


UNPRIVILEGED = """
import sys
from carrel.errors import PlatformError
from carrel.workspaces.volumes.btrfs_pool import Pool
try:
    Pool(sys.argv[1] + "/pool.btrfs", sys.argv[1] + "/pool", 0, 0).open()
except PlatformError as error:
    print(error.detail)
"""


def test_a_pool_that_cannot_be_mounted_is_not_left_behind(tmp_path: Path) -> None:
    if (reason := missing_programs()) is not None:
        pytest.skip(reason)
    argv = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", sys.executable, "-c", UNPRIVILEGED]
    done = subprocess.run([*argv, str(tmp_path)], check=True, capture_output=True, text=True)
    assert "failed" in done.stdout
    assert os.listdir(tmp_path) == ["pool"]


def test_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(str(tmp_path / "pool.btrfs"), str(tmp_path / "pool"), 0, 0)
    pool.require_room()
    full = os.statvfs_result([4096, 4096, 1000, 0, 0, 1000, 0, 0, 0, 255])
    monkeypatch.setattr(os, "statvfs", lambda _path: full)
    with pytest.raises(PlatformError, match=r"the disk that holds .*/pool.btrfs is full"):
        pool.require_room()
