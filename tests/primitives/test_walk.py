"""Opening things in a tree that somebody else controls."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest
from tests.support.nesting import nested

from carrel.errors import LimitExceeded
from carrel.primitives import libc, walk


def test_two_directories_change_places_in_one_step(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert libc.exchange(str(tmp_path / "a"), str(tmp_path / "b"))
    assert os.listdir(tmp_path / "a") == ["b"]
    with pytest.raises(FileNotFoundError):
        libc.exchange(str(tmp_path / "a"), str(tmp_path / "none"))


def test_links_are_never_followed(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "secret").write_text("x")
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "away").symlink_to(tmp_path / "out")
    (tree / "file").symlink_to(tmp_path / "out" / "secret")
    root = os.open(tree, walk.DIRECTORY)
    directories = walk.Directories(root)
    try:
        with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
            directories.get(directories.add(0, "away"))
        with pytest.raises(OSError, match="Too many levels"):
            walk.open_for_reading("file", root)
        assert [visited.path for visited in walk.visit(root)] == [""]
    finally:
        directories.close()
        os.close(root)


def test_few_directories_stay_open_however_many_there_are(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / str(number) / "below").mkdir(parents=True)
    root = os.open(tmp_path, walk.DIRECTORY)
    before = len(os.listdir("/proc/self/fd"))
    try:
        most = 0
        for _ in walk.visit(root):
            most = max(most, len(os.listdir("/proc/self/fd")) - before)
        assert most <= 100
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        os.close(root)


def test_holes_are_seen(tmp_path: Path) -> None:
    with open(tmp_path / "f", "wb") as file:
        file.truncate(10 << 20)
        file.seek(4 << 20)
        file.write(b"x" * 4096)
        file.flush()
        extents = walk.data_extents(file.fileno(), 10 << 20)
    assert extents == [(4 << 20, 4096)]


def test_what_is_dirty_is_told_and_written(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    try:
        os.write(fd, b"x" * 10_000)
        found = libc.dirty(fd)
        libc.start_writing(fd)
        libc.finish_writing(fd)
        libc.sync(fd)
        assert (found, libc.dirty(fd)) in {(True, False), (None, None)}
    finally:
        os.close(fd)
    assert libc.dirty(fd) is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        libc.finish_writing(fd)


def test_a_refused_request_is_an_error(tmp_path: Path) -> None:
    fd = os.open(tmp_path, walk.DIRECTORY)
    try:
        with pytest.raises(OSError, match="Inappropriate ioctl"):
            libc.ioctl(fd, 0x9400, bytearray(8))
    finally:
        os.close(fd)


def test_who_writes_back_is_gone_afterwards_also_when_it_failed(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with pytest.raises(RuntimeError), walk.writing_back(fd):
            (tmp_path / "file").write_bytes(b"x" * 1000)
            raise RuntimeError
    finally:
        os.close(fd)
    assert not [each for each in threading.enumerate() if each.name == "carrel-write-back"]


def test_visit_goes_on_after_a_deep_directory_was_moved(tmp_path: Path) -> None:
    """The way back up does not lead through where the directory is now; what is beside its old parents is not lost."""
    tree = tmp_path / "tree"
    tree.mkdir()
    with nested(tree, 300, "d", beside=True):
        root = os.open(tree, walk.DIRECTORY)
        beside: set[int] = set()
        moved = False
        try:
            for visited in walk.visit(root):
                depth = visited.path.count("/") + 1 if visited.path else 0
                if visited.name == "beside":
                    beside.add(depth)
                if depth == 250 and not moved:
                    os.rename(tree.joinpath(*["d"] * 150), tree / "moved")
                    moved = True
        finally:
            os.close(root)
    assert moved
    assert beside >= set(range(1, 151))


def test_directories_of_a_deep_tree_are_found_from_one_another(tmp_path: Path) -> None:
    with nested(tmp_path, 400, "d", beside=True):
        root = os.open(tmp_path, walk.DIRECTORY)
        directories = walk.Directories(root)
        inodes = {}
        try:
            for visited in walk.visit(root):
                if visited.number:
                    directories.add(visited.parent, visited.name)
                inodes[visited.number] = visited.info.st_ino
            numbers = list(inodes)
            for number in (*numbers, *reversed(numbers), *random.Random(3).sample(numbers, 100)):
                assert os.fstat(directories.get(number)).st_ino == inodes[number]
            directories.close()
            assert os.fstat(directories.get(numbers[-1])).st_ino == inodes[numbers[-1]]
        finally:
            directories.close()
            os.close(root)


def test_directories_far_apart_again_and_again_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "_SPARE_STEPS", 1000)
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    with nested(tmp_path / "one", 300, "d"), nested(tmp_path / "other", 300, "d"):
        root = os.open(tmp_path, walk.DIRECTORY)
        directories = walk.Directories(root)
        try:
            ends = []
            for name in ("one", "other"):
                number = directories.add(0, name)
                for _ in range(300):
                    number = directories.add(number, "d")
                ends.append(number)
            with pytest.raises(LimitExceeded, match="nested too deep"):
                for number in ends * 1000:
                    directories.get(number)
        finally:
            directories.close()
            os.close(root)
