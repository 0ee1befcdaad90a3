"""What only the btrfs driver promises: the kernel holds the cap and counts, streams are small, a pool is left clean."""

from __future__ import annotations

import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.children import in_child
from tests.support.trees_for_tests import mutate, picture
from tests.support.volumes import damage_of, replace_files, stored_bytes, unmount

from carrel.errors import PlatformError
from carrel.primitives import walk
from carrel.workspaces.layout import CANONICAL_UID
from carrel.workspaces.volumes import BtrfsDriver, btrfs_ioctls, btrfs_pool
from carrel.workspaces.volumes.btrfs_pool import mounted_at

MB = 1 << 20


@pytest.fixture
def btrfs(make) -> BtrfsDriver:  # type: ignore[no-untyped-def]
    driver = make("btrfs")
    assert isinstance(driver, BtrfsDriver)
    return driver


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait for a condition to hold."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


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
    assert wrote <= btrfs.usage("a") <= wrote + MB
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
    before = stored_bytes(btrfs)
    for number in range(20):
        btrfs.fork("s", f"f{number}", 100 * MB)
    assert stored_bytes(btrfs) <= 1.1 * before


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
        assert driver.grow_if_needed()
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
            replace_files(driver, "a", str(big))
        assert picture(driver.path("a")) == before
        assert driver.volumes() == os.listdir(os.path.dirname(driver.path("a"))) == ["a"]
        assert damage_of(driver, "s") is None
    finally:
        driver.close()


def test_what_the_agent_put_a_subvolume_into_can_still_be_removed(btrfs: BtrfsDriver) -> None:
    """A sandbox refuses this; whatever got there another way must not stay for ever."""
    btrfs.create("a", 20 * MB)
    fd = os.open(btrfs.path("a"), walk.DIRECTORY)

    def as_agent() -> None:
        os.setgroups([])
        os.setresgid(CANONICAL_UID, CANONICAL_UID, CANONICAL_UID)
        os.setresuid(CANONICAL_UID, CANONICAL_UID, CANONICAL_UID)
        btrfs_ioctls.create_subvolume(fd, "nested")

    try:
        assert in_child(as_agent) is None
    finally:
        os.close(fd)
    Path(btrfs.path("a"), "nested", "inside").write_text("not in a snapshot")
    Path(btrfs.path("a"), "beside").write_text("in a snapshot")
    btrfs.snapshot("a", "s")
    btrfs.fork("s", "b", None)
    assert os.listdir(os.path.join(btrfs.path("b"), "nested")) == []
    assert "/beside" in picture(btrfs.path("b"))
    btrfs.restore("a", "s")
    for name in ("a", "b"):
        btrfs.delete_volume(name)
    btrfs.delete_snapshot("s")
    assert os.listdir(btrfs.directory) == []


def test_a_volume_is_its_owners_and_has_its_cap_from_the_start(btrfs: BtrfsDriver) -> None:
    btrfs.create("a", 20 * MB)
    info = os.stat(btrfs.path("a"))
    assert (info.st_uid, info.st_gid, info.st_mode & 0o7777) == (CANONICAL_UID, CANONICAL_UID, 0o700)
    assert btrfs.cap("a") == 20 * MB
    btrfs.snapshot("a", "s")
    btrfs.fork("s", "b", 10 * MB)
    btrfs.fork("s", "c", None)
    assert [btrfs.cap(name) for name in "abc"] == [20 * MB, 10 * MB, None]
    assert fill(os.path.join(btrfs.path("b"), "x"), 20) <= 10 * MB
    btrfs.set_cap("a", None)
    assert btrfs.cap("a") is None


def test_usage_shows_what_was_just_written(btrfs: BtrfsDriver) -> None:
    btrfs.create("a", 20 * MB)
    with open(os.path.join(btrfs.path("a"), "x"), "wb") as file:
        file.write(os.urandom(5 * MB))
    assert 5 * MB <= btrfs.usage("a") <= 6 * MB
    stored_bytes(btrfs)
    assert 5 * MB <= btrfs.usage("a") <= 6 * MB


def test_every_change_changes_the_generation_and_nothing_else_does(btrfs: BtrfsDriver) -> None:
    for name in "ab":
        btrfs.create(name, None)
    root = btrfs.path("a")
    path = os.path.join(root, "x")
    changes: list[Callable[[], object]] = [
        lambda: Path(path).write_bytes(b"1"),
        lambda: Path(path).write_bytes(b"2"),
        lambda: os.chmod(path, 0o640),
        lambda: os.setxattr(path, "user.x", b"1"),
        lambda: os.link(path, path + "2"),
        lambda: os.rename(path + "2", path + "3"),
        lambda: os.symlink("x", path + "4"),
        lambda: os.truncate(path, 100),
        lambda: os.unlink(path + "3"),
        lambda: os.mkdir(path + "5"),
        lambda: os.utime(path, ns=(5, 5)),
    ]
    seen = {btrfs.generation("a")}
    for change in changes:
        change()
        fresh = btrfs.generation("a")
        assert fresh not in seen
        seen.add(fresh)
        Path(btrfs.path("b"), "y").write_bytes(os.urandom(10))
        os.sync()
        still = btrfs.generation("a")  # writing to the disk may show once more
        for _ in range(3):
            Path(btrfs.path("b"), "y").write_bytes(os.urandom(10))
            btrfs.snapshot("b", f"b{len(seen)}-{_}")
            assert btrfs.generation("a") == still
        seen.add(still)
    btrfs.snapshot("a", "s")
    assert btrfs.generation("a") in seen
    btrfs.restore("a", "s")
    assert btrfs.generation("a") not in seen


def test_a_write_through_a_memory_map_shows_once_it_is_on_the_disk(btrfs: BtrfsDriver) -> None:
    btrfs.create("a", None)
    path = os.path.join(btrfs.path("a"), "x")
    Path(path).write_bytes(bytes(4096))
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 4096) as memory:
        memory[0] = 1
        before = btrfs.generation("a")
        memory[1] = 2  # the page is already dirty: no fault, no new time
        os.sync()
        assert btrfs.generation("a") != before


def test_blocks_go_back_to_the_host(btrfs: BtrfsDriver, tmp_path: Path) -> None:
    file = next(tmp_path.glob("*/pool.btrfs"))
    btrfs.create("a", None)
    fill(os.path.join(btrfs.path("a"), "x"), 60)
    stored_bytes(btrfs)
    full = file.stat().st_blocks * 512
    assert full > 60 * MB
    btrfs.delete_volume("a")
    until(lambda: btrfs.collect_garbage() and file.stat().st_blocks * 512 < full - 50 * MB)


def test_a_group_goes_with_its_subvolume(btrfs: BtrfsDriver) -> None:
    def groups() -> int:
        btrfs.collect_garbage()
        return len(btrfs_pool.run("btrfs", "qgroup", "show", btrfs.directory).splitlines())

    before = groups()
    for number in range(5):
        btrfs.create(f"v{number}", MB)
        btrfs.snapshot(f"v{number}", f"s{number}")
    assert groups() == before + 10
    for number in range(5):
        btrfs.delete_volume(f"v{number}")
        btrfs.delete_snapshot(f"s{number}")
    until(lambda: groups() == before)


@contextmanager
def mounted(tmp_path: Path, kind: str, megabytes: int) -> Iterator[Path]:
    """A small file system of the test's own."""
    image, place = tmp_path / f"{kind}.image", tmp_path / f"{kind}.mount"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(megabytes * MB)
    btrfs_pool.run(f"mkfs.{kind}", "-q", str(image))
    btrfs_pool.run("mount", "-o", "loop", str(image), str(place))
    try:
        yield place
    finally:
        unmount(str(place))


def test_a_directory_on_btrfs_needs_no_pool(tmp_path: Path) -> None:
    if (reason := btrfs_pool.missing_programs()) is not None:
        pytest.skip(reason)
    with mounted(tmp_path, "btrfs", 256) as place:
        for turn in range(2):
            driver = BtrfsDriver(str(place / "deep" / "down"))
            assert driver.missing() is None
            driver.open()
            try:
                assert sorted(os.listdir(place / "deep" / "down")) == ["snapshots", "volumes"]
                if turn == 0:
                    driver.create("a", 20 * MB)
                    mutate(driver.path("a"), random.Random(1), 40)
                    driver.snapshot("a", "s")
                    wanted = picture(driver.path("a"))
                else:
                    assert driver.volumes() == os.listdir(driver.directory) == ["a"]
                driver.restore("a", "s")
                assert picture(driver.path("a")) == wanted
                assert driver.cap("a") == 20 * MB
                assert 17 * MB <= fill(os.path.join(driver.path("a"), "x"), 40) <= 20 * MB
                assert not driver.grow_if_needed()
                driver.collect_garbage()
                os.mkdir(os.path.join(driver.directory, ".aside-left"))
            finally:
                driver.close()


def test_a_pool_is_no_larger_than_the_host_has_room_for(tmp_path: Path) -> None:
    if (reason := btrfs_pool.missing_programs()) is not None:
        pytest.skip(reason)
    with mounted(tmp_path, "ext4", 400) as place:
        driver = BtrfsDriver(str(place / "p"))
        driver.open()
        try:
            driver.create("a", None)
            driver.snapshot("a", "s")
            assert 100 * MB < fill(os.path.join(driver.path("a"), "x"), 400) < 330 * MB
            os.sync()
            assert not driver.grow_if_needed()
            os.unlink(os.path.join(driver.path("a"), "x"))
            os.sync()
            assert driver.usage("a") < MB
            assert damage_of(driver, "s") is None
        finally:
            driver.close()


def test_a_host_that_others_filled_refuses_and_loses_nothing(tmp_path: Path) -> None:
    if (reason := btrfs_pool.missing_programs()) is not None:
        pytest.skip(reason)
    with mounted(tmp_path, "ext4", 400) as place:
        driver = BtrfsDriver(str(place / "p"))
        driver.open()
        try:
            driver.create("a", None)
            mutate(driver.path("a"), random.Random(1), 40)
            driver.snapshot("a", "s")
            wanted = picture(driver.path("a"))
            os.sync()
            fill(str(place / "others"), 400)
            for refused in (
                lambda: driver.create("b", None),
                lambda: driver.snapshot("a", "t"),
                lambda: driver.fork("s", "b", None),
                lambda: driver.restore("a", "s"),
                lambda: replace_files(driver, "a", str(tmp_path)),
            ):
                with pytest.raises(PlatformError, match="full"):
                    refused()
            assert driver.volumes() == ["a"]
            assert driver.snapshots() == ["s"]
            os.unlink(place / "others")
            driver.fork("s", "b", None)
            assert picture(driver.path("a")) == picture(driver.path("b")) == wanted
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
from carrel.primitives import libc
from carrel.workspaces.volumes import btrfs
guarded(libc, "ioctl")
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
