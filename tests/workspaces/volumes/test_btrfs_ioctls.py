"""Subvolumes as the kernel makes them, on a file system of the test's own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
from tests.support.volumes import stored_bytes

from carrel.primitives import walk
from carrel.workspaces.volumes import BtrfsDriver, btrfs_ioctls
from carrel.workspaces.volumes.btrfs_pool import run


@pytest.fixture
def top(make) -> Iterator[int]:  # type: ignore[no-untyped-def]
    """An open directory on btrfs."""
    driver = make("btrfs")
    assert isinstance(driver, BtrfsDriver)
    fd = os.open(driver.directory, walk.DIRECTORY)
    yield fd
    os.close(fd)


def inside(parent: int, name: str) -> int:
    return os.open(name, walk.DIRECTORY, dir_fd=parent)


def test_other_file_systems_are_told_apart(top: int) -> None:
    found = btrfs_ioctls.file_system(top)
    assert found is not None
    assert os.path.isdir(f"/sys/fs/btrfs/{found.uuid}")
    other = os.open("/proc", walk.DIRECTORY)
    try:
        assert btrfs_ioctls.file_system(other) is None
    finally:
        os.close(other)


def test_what_lies_in_a_subvolume_goes_with_it(top: int) -> None:
    btrfs_ioctls.create_subvolume(top, "outer")
    outer = inside(top, "outer")
    for number in range(150):
        btrfs_ioctls.create_subvolume(outer, f"inner{number}")
    os.mkdir("folder", dir_fd=outer)
    folder = inside(outer, "folder")
    inner = inside(outer, "inner7")
    btrfs_ioctls.create_subvolume(folder, "odd\nname")
    btrfs_ioctls.create_subvolume(inner, "deepest")
    numbers = btrfs_ioctls.subvolumes_in(top, btrfs_ioctls.number_of(outer))
    assert len(numbers) == len(set(numbers)) == 151
    deepest = btrfs_ioctls.subvolumes_in(top, btrfs_ioctls.number_of(inner))
    assert len(deepest) == 1
    for fd in (outer, folder, inner):
        os.close(fd)
    btrfs_ioctls.delete_subvolume(top, "outer")
    assert os.listdir(top) == []


def test_a_picture_is_of_the_moment_and_cannot_be_written(top: int) -> None:
    btrfs_ioctls.create_subvolume(top, "a")
    a = inside(top, "a")
    os.mkdir("kept", dir_fd=a)
    btrfs_ioctls.create_snapshot(a, top, "picture", read_only=True)
    os.mkdir("later", dir_fd=a)
    picture = inside(top, "picture")
    assert os.listdir(picture) == ["kept"]
    with pytest.raises(OSError, match="Read-only"):
        os.mkdir("more", dir_fd=picture)
    with pytest.raises(FileExistsError):
        btrfs_ioctls.create_snapshot(a, top, "picture", read_only=True)
    with pytest.raises(FileNotFoundError):
        btrfs_ioctls.delete_subvolume(top, "none")
    os.close(a)
    os.close(picture)


def test_other_threads_run_while_the_kernel_works(top: int) -> None:
    btrfs_ioctls.create_subvolume(top, "a")
    a = inside(top, "a")
    ran = threading.Event()
    stop = threading.Event()

    def count() -> None:
        while not stop.is_set():
            ran.set()

    thread = threading.Thread(target=count)
    thread.start()
    try:
        for number in range(200):  # where every core is busy, it gets none within each
            ran.clear()
            btrfs_ioctls.create_snapshot(a, top, f"s{number}", read_only=True)
            if ran.is_set():
                break
        assert ran.is_set()
    finally:
        stop.set()
        thread.join()
        os.close(a)


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
            assert btrfs_ioctls.referenced(fd) == (int(line[1]), limit)
            assert line[0] == f"0/{btrfs_ioctls.number_of(fd)}"
        finally:
            os.close(fd)
