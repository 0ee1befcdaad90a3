"""What only the btrfs driver promises: the kernel holds the cap and counts, streams are small, a pool is left clean."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from trees_for_tests import mutate, picture

from carrel.errors import PlatformError
from carrel.workspaces.volumes import BtrfsDriver
from carrel.workspaces.volumes.pool import mounted_at

MB = 1 << 20


@pytest.fixture
def btrfs(make) -> BtrfsDriver:  # type: ignore[no-untyped-def]
    driver = make("btrfs")
    assert isinstance(driver, BtrfsDriver)
    return driver


def fill(path: str, count: int) -> int:
    """Write megabytes of noise until the kernel refuses; how many bytes were taken."""
    wrote = 0
    try:
        fd = os.open(path, os.O_CREAT | os.O_WRONLY)
    except OSError:
        return 0
    try:
        for _ in range(count):
            wrote += os.write(fd, os.urandom(MB))
        os.fsync(fd)
    except OSError:
        pass
    finally:
        os.close(fd)
    return wrote


def test_the_kernel_holds_the_cap_and_counts(btrfs: BtrfsDriver) -> None:
    btrfs.create("a", 20 * MB)
    wrote = fill(os.path.join(btrfs.path("a"), "x"), 40)
    assert 19 * MB <= wrote <= 20 * MB
    usage = btrfs.usage("a")
    assert usage.constant_time
    assert wrote <= usage.bytes <= wrote + MB
    btrfs.set_cap("a", 30 * MB)
    more = fill(os.path.join(btrfs.path("a"), "y"), 40)
    assert 9 * MB <= more <= 11 * MB
    btrfs.snapshot("a", "s")
    btrfs.restore("a", "s")
    assert btrfs.cap("a") == 30 * MB
    assert fill(os.path.join(btrfs.path("a"), "z"), 5) <= MB
    os.unlink(os.path.join(btrfs.path("a"), "x"))
    assert fill(os.path.join(btrfs.path("a"), "w"), 5) == 5 * MB


def test_twenty_forks_share_their_blocks(btrfs: BtrfsDriver) -> None:
    btrfs.create("a", None)
    fill(os.path.join(btrfs.path("a"), "x"), 40)
    btrfs.snapshot("a", "s")
    before = btrfs.stored_bytes()
    for number in range(20):
        btrfs.fork("s", f"f{number}", 100 * MB)
    assert btrfs.stored_bytes() <= 1.1 * before


def test_a_pool_grows_is_found_again_and_leaves_nothing(tmp_path: Path) -> None:
    driver = BtrfsDriver(str(tmp_path / "p"), pool_bytes=128 * MB, pool_max_bytes=512 * MB)
    if (reason := driver.missing()) is not None:
        pytest.skip(reason)
    driver.open()
    try:
        file = tmp_path / "p" / "pool.btrfs"
        driver.create("a", None)
        fill(os.path.join(driver.path("a"), "x"), 105)
        os.sync()
        assert driver.tend()
        assert file.stat().st_size == 256 * MB
        assert fill(os.path.join(driver.path("a"), "y"), 60) == 60 * MB
        driver.snapshot("a", "s")
        before = picture(driver.path("a"))
    finally:
        driver.close()
        driver.close()
    assert mounted_at(str(tmp_path / "p" / "pool")) is None
    assert not backed_by(file)
    again = BtrfsDriver(str(tmp_path / "p"), pool_bytes=128 * MB, pool_max_bytes=512 * MB)
    again.open()
    try:
        assert picture(again.path("a")) == before
        assert again.snapshots() == ["s"]
    finally:
        again.close()


def backed_by(file: Path) -> bool:
    names = Path("/sys/block").glob("loop*/loop/backing_file")
    return any(each.read_text().strip() == str(file) for each in names)


def test_a_full_pool_fails_cleanly(tmp_path: Path) -> None:
    driver = BtrfsDriver(str(tmp_path / "p"), pool_bytes=128 * MB, pool_max_bytes=128 * MB)
    if (reason := driver.missing()) is not None:
        pytest.skip(reason)
    driver.open()
    try:
        driver.create("a", None)
        mutate(driver.path("a"), random.Random(1), 30)
        driver.snapshot("a", "s")
        before = picture(driver.path("a"))
        big = tmp_path / "big"
        big.mkdir()
        fill(str(big / "x"), 150)
        with pytest.raises(PlatformError, match="No space left"):
            driver.import_tree("a", str(big))
        assert picture(driver.path("a")) == before
        assert driver.volumes() == os.listdir(os.path.dirname(driver.path("a"))) == ["a"]
        assert driver.verify("s") == []
    finally:
        driver.close()


KILLED = """
import os, signal, sys
from carrel.workspaces.volumes import BtrfsDriver
left = int(sys.argv[2])
def guarded(where, name):
    real = getattr(where, name)
    def call(*arguments, **named):
        global left
        left -= 1
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **named)
    setattr(where, name, call)
driver = BtrfsDriver(sys.argv[1])
driver.open()
guarded(os, "rename")
from carrel.workspaces.volumes import btrfs, kernel
guarded(kernel, "control")
guarded(btrfs, "exchange")
driver.snapshot("a", "two")
driver.restore("a", "one")
driver.fork("one", "b", None)
"""


def test_a_kill_leaves_the_old_or_the_new(btrfs: BtrfsDriver, tmp_path: Path) -> None:
    btrfs.create("a", None)
    mutate(btrfs.path("a"), random.Random(1), 25)
    btrfs.snapshot("a", "one")
    one = picture(btrfs.path("a"))
    place = str(tmp_path / "btrfs0")
    killed = 0
    for after in (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 18, 20, 1000):
        mutate(btrfs.path("a"), random.Random(after), 4)
        before = picture(btrfs.path("a"))
        code = subprocess.run([sys.executable, "-c", KILLED, place, str(after)], check=False).returncode
        assert code in {0, -signal.SIGKILL}
        killed += code != 0
        btrfs.open()
        assert picture(btrfs.path("a")) in (before, one)
        assert set(os.listdir(os.path.dirname(btrfs.path("a")))) <= {"a", "b"}
        if btrfs.exists("b"):
            assert picture(btrfs.path("b")) == one
        btrfs.delete_volume("b")
        btrfs.delete_snapshot("two")
    assert killed >= 7
