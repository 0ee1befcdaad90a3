from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from carrel.primitives.trees import remove_live_tree
from carrel.supervisor.trees import Walk


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    handle = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield handle
    os.close(handle)


def paths(fd: int, *, recursive: bool = True, limit: int = 1000) -> tuple[list[bytes], bool]:
    walk = Walk(os.open(".", os.O_RDONLY, dir_fd=fd), b".", recursive=recursive, limit=limit)
    return [entry.path for entry in walk.steps() if entry is not None], walk.truncated


def dig(top: Path, levels: int) -> None:
    """A chain of directories far deeper than a path or the open files of a process reach."""
    here = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY | os.O_DIRECTORY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


def test_walk_is_ordered_and_follows_nothing(tmp_path: Path, fd: int) -> None:
    (tmp_path / "b" / "x").mkdir(parents=True)
    (tmp_path / "b" / "x" / "deep").touch()
    (tmp_path / "a").touch()
    (tmp_path / "b" / "up").symlink_to("..")
    (tmp_path / "c").symlink_to("/")
    assert paths(fd) == ([b"a", b"b", b"b/up", b"b/x", b"b/x/deep", b"c"], False)
    assert paths(fd, recursive=False) == ([b"a", b"b", b"c"], False)


@pytest.mark.parametrize("limit", [1, 2, 5, 6, 7, 100])
def test_walk_is_cut_at_the_limit(tmp_path: Path, fd: int, limit: int) -> None:
    everything = [b"a", b"a/1", b"a/2", b"b", b"b/1", b"c"]
    for path in ("a/1", "a/2", "b/1"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / "c").touch()
    assert paths(fd, limit=limit) == (everything[:limit], limit < 6)


def test_walk_of_a_wide_directory_keeps_the_first_names(tmp_path: Path, fd: int) -> None:
    for number in range(6000):
        os.close(os.open(f"{number:05}", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    assert paths(fd, limit=3) == ([b"00000", b"00001", b"00002"], True)


async def test_deep_trees_are_walked_and_removed(tmp_path: Path, fd: int) -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    (tmp_path / "top").mkdir()
    dig(tmp_path / "top", 10_000)
    found, truncated = paths(fd, limit=10_000)
    assert truncated and len(found) == 2047 and len(found[-1]) <= 4095
    await remove_live_tree(fd, b"top")
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == open_before


async def test_removal_follows_no_symlink(tmp_path: Path, fd: int) -> None:
    (tmp_path / "keep").mkdir()
    (tmp_path / "keep" / "file").write_text("kept")
    (tmp_path / "top" / "sub").mkdir(parents=True)
    (tmp_path / "top" / "sub" / "link").symlink_to(tmp_path / "keep")
    (tmp_path / "top" / "up").symlink_to("..")
    await remove_live_tree(fd, b"top")
    assert (tmp_path / "keep" / "file").read_text() == "kept"
    assert os.listdir(tmp_path) == ["keep"]


async def test_removal_of_a_wide_tree(tmp_path: Path, fd: int) -> None:
    for number in range(300):
        (tmp_path / "top" / f"{number}" / "x").mkdir(parents=True)
        (tmp_path / "top" / f"{number}" / "file").touch()
    await remove_live_tree(fd, b"top")
    assert os.listdir(tmp_path) == []


async def test_removal_of_a_symlink_to_a_directory_is_refused(tmp_path: Path, fd: int) -> None:
    (tmp_path / "keep").mkdir()
    (tmp_path / "link").symlink_to("keep")
    with pytest.raises(OSError):
        await remove_live_tree(fd, b"link")
    assert (tmp_path / "keep").is_dir()
