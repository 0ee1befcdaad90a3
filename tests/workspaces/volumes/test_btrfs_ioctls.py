"""Subvolumes as the kernel makes them, on a file system of the test's own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from carrel.workspaces.volumes import BtrfsDriver, btrfs_ioctls, kernel


@pytest.fixture
def top(make) -> Iterator[int]:  # type: ignore[no-untyped-def]
    """An open directory on btrfs."""
    driver = make("btrfs")
    assert isinstance(driver, BtrfsDriver)
    fd = os.open(driver.directory, kernel.DIRECTORY)
    yield fd
    os.close(fd)


def inside(parent: int, name: str) -> int:
    return os.open(name, kernel.DIRECTORY, dir_fd=parent)


def test_other_file_systems_are_told_apart(top: int) -> None:
    found = btrfs_ioctls.file_system(top)
    assert found is not None
    assert os.path.isdir(f"/sys/fs/btrfs/{found.uuid}")
    other = os.open("/proc", kernel.DIRECTORY)
    try:
        assert btrfs_ioctls.file_system(other) is None
    finally:
        os.close(other)


def test_what_lies_in_a_subvolume_goes_with_it(top: int) -> None:
    btrfs_ioctls.create(top, "outer")
    outer = inside(top, "outer")
    for number in range(150):
        btrfs_ioctls.create(outer, f"inner{number}")
    os.mkdir("folder", dir_fd=outer)
    folder = inside(outer, "folder")
    inner = inside(outer, "inner7")
    btrfs_ioctls.create(folder, "odd\nname")
    btrfs_ioctls.create(inner, "deepest")
    numbers = btrfs_ioctls.children(top, btrfs_ioctls.number_of(outer))
    assert len(numbers) == len(set(numbers)) == 151
    deepest = btrfs_ioctls.children(top, btrfs_ioctls.number_of(inner))
    assert len(deepest) == 1
    for fd in (outer, folder, inner):
        os.close(fd)
    btrfs_ioctls.destroy(top, "outer")
    assert os.listdir(top) == []


def test_a_picture_is_of_the_moment_and_cannot_be_written(top: int) -> None:
    btrfs_ioctls.create(top, "a")
    a = inside(top, "a")
    os.mkdir("kept", dir_fd=a)
    btrfs_ioctls.snapshot(a, top, "picture", read_only=True)
    os.mkdir("later", dir_fd=a)
    picture = inside(top, "picture")
    assert os.listdir(picture) == ["kept"]
    with pytest.raises(OSError, match="Read-only"):
        os.mkdir("more", dir_fd=picture)
    with pytest.raises(FileExistsError):
        btrfs_ioctls.snapshot(a, top, "picture", read_only=True)
    with pytest.raises(FileNotFoundError):
        btrfs_ioctls.destroy(top, "none")
    os.close(a)
    os.close(picture)


def test_other_threads_run_while_the_kernel_works(top: int) -> None:
    btrfs_ioctls.create(top, "a")
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
            btrfs_ioctls.snapshot(a, top, f"s{number}", read_only=True)
            if ran.is_set():
                break
        assert ran.is_set()
    finally:
        stop.set()
        thread.join()
        os.close(a)
