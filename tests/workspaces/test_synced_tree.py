"""A tree that hostile code changes while it is read and written."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import count
from pathlib import Path

import pytest
from tests.support.children import in_child

from carrel.errors import LimitExceeded, PlatformError
from carrel.workspaces.filespace import LocalFile
from carrel.workspaces.synced_tree import Hashed, Obstructed, SyncedTree, hashed


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "w"
    path.mkdir()
    return path


@pytest.fixture
def tree(root: Path) -> Iterator[SyncedTree]:
    with closing(SyncedTree(str(root))) as tree:
        yield tree


def files(tree: SyncedTree) -> dict[str, LocalFile]:
    found = tree.scan({})
    tree.read(found)
    return found.files


def test_only_files_are_taken(root: Path, tree: SyncedTree) -> None:
    (root / "d").mkdir()
    (root / "d/f").write_bytes(b"x")
    os.symlink("d", root / "link")
    os.mkfifo(root / "pipe")
    listener = socket.socket(socket.AF_UNIX)
    here = os.open(root, os.O_RDONLY)
    try:
        listener.bind(f"/proc/self/fd/{here}/socket")
        found = tree.scan({})
    finally:
        os.close(here)
        listener.close()
    assert found.skipped == 3 and found.apparent == 1 and list(found.unread) == ["d/f"] and found.files == {}
    assert tree.read(found) == 1 and list(found.files) == ["d/f"]
    with pytest.raises(PlatformError):
        SyncedTree(str(root / "absent"))


def test_a_file_that_changes_while_it_is_read_is_read_again(root: Path, tree: SyncedTree) -> None:
    (root / "f").write_bytes(b"first")
    reads: list[bytes] = []

    def read(fd: int, size: int) -> Hashed:
        reads.append(os.pread(fd, size, 0))
        if len(reads) == 1:
            (root / "f").write_bytes(b"second")
        return hashed(fd, size)

    taken = tree.take("f", read)
    assert taken is not None and reads == [b"first", b"second"]
    assert taken[1].content.hash == taken[0].hash == files(tree)["f"].content.hash

    def always(fd: int, size: int) -> Hashed:
        (root / "f").write_bytes(os.urandom(8))
        return hashed(fd, size)

    taken = tree.take("f", always)
    assert taken is not None and taken[1].known.inode == 0  # never believed without reading


def test_what_is_taken_never_lies_outside(root: Path, tree: SyncedTree, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"s")
    os.symlink(tmp_path, root / "d")
    os.symlink(tmp_path / "secret", root / "s")
    for path in ("d/secret", "s", "absent", "absent/f"):
        assert tree.take(path, hashed) is None and tree.gone(path)
    for path in ("d/secret", "s", "d/new"):
        with pytest.raises(Obstructed):
            tree.write(path, 0o644, [b"new"], None)
    assert (tmp_path / "secret").read_bytes() == b"s" and not (tmp_path / "new").exists()
    assert sorted(os.listdir(root)) == ["d", "s"]


def test_writing_replaces_only_files_and_empty_directories(root: Path, tree: SyncedTree) -> None:
    assert tree.write("a/b/c", 0o640, [b"one", b"two"], None)
    assert (root / "a/b/c").read_bytes() == b"onetwo"
    assert stat.S_IMODE((root / "a/b/c").stat().st_mode) == 0o640
    seen = files(tree)["a/b/c"]
    assert tree.write("a/b/c", 0o644, [b"three"], seen)
    assert not tree.write("a/b/c", 0o644, [b"four"], seen), "it is not what it was"
    with pytest.raises(Obstructed):
        tree.write("a", 0o644, [b"x"], None)
    with pytest.raises(Obstructed):
        tree.write("a/b/c/d", 0o644, [b"x"], None)
    with pytest.raises(Obstructed):
        tree.write("n" * 300, 0o644, [b"x"], None)
    (root / "e/f/g").mkdir(parents=True)
    (root / "e/h").mkdir()
    assert tree.write("e", 0o644, [b"x"], None) and (root / "e").is_file()
    assert sorted(os.listdir(root)) == ["a", "e"] and os.listdir(root / "a/b") == ["c"]
    tree.flush()


def test_a_write_that_fails_leaves_nothing(root: Path, tree: SyncedTree) -> None:
    def content() -> Iterator[bytes]:
        yield b"half"
        raise PlatformError("the rest is missing")

    (root / "f").write_bytes(b"old")
    with pytest.raises(PlatformError):
        tree.write("f", 0o644, content(), None)
    assert os.listdir(root) == ["f"] and (root / "f").read_bytes() == b"old"


def test_only_what_is_as_it_was_is_removed(root: Path, tree: SyncedTree) -> None:
    (root / "d").mkdir()
    (root / "d/f").write_bytes(b"x")
    seen = files(tree)["d/f"]
    (root / "d/f").write_bytes(b"changed")
    assert not tree.remove("d/f", seen) and (root / "d/f").exists() and not tree.gone("d/f")
    seen = files(tree)["d/f"]
    assert tree.remove("d/f", seen) and not (root / "d/f").exists()
    assert tree.remove("d/f", seen)
    (root / "d/f").mkdir()
    assert not tree.remove("d/f", seen)
    shutil.rmtree(root / "d")
    os.symlink("/etc", root / "d")
    assert tree.remove("d/f", seen)


def test_a_file_may_not_claim_more_than_the_workspace_may_have(root: Path) -> None:
    (root / "f").write_bytes(b"12345")
    with closing(SyncedTree(str(root), most_bytes=4)) as tree, pytest.raises(LimitExceeded):
        tree.take("f", hashed)


def test_directories_that_turn_into_links_lead_nowhere(root: Path, tree: SyncedTree, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (root / "real").mkdir()
    over = threading.Event()
    numbers = count()

    def swap() -> None:
        while not over.is_set():
            with suppress(OSError):  # the writer makes a directory of that name too
                os.rename(root / "real", root / "d")
                os.rename(root / "d", root / "real")
            with suppress(OSError):
                os.rename(root / "d", root / f"made{next(numbers)}")
            with suppress(OSError):
                os.symlink(outside, root / "d")
                os.unlink(root / "d")

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        for number in range(300):
            try:
                tree.write(f"d/{number}", 0o644, [b"x"], None)
            except (Obstructed, PlatformError):
                continue
    finally:
        over.set()
        swapping.join()
    assert os.listdir(outside) == []


def test_as_an_ordinary_user(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("changes to another user")
    root = tmp_path / "w"
    root.mkdir()
    os.chown(root, 1000, 1000)
    for part in (tmp_path, *tmp_path.parents):
        if part.stat().st_mode & 0o001 == 0 and part != Path("/"):
            os.chmod(part, part.stat().st_mode | 0o011)

    def work() -> object:
        os.setgroups([])
        os.setgid(1000)
        os.setuid(1000)
        with closing(SyncedTree(str(root))) as tree:
            tree.write("d/f", 0o000, [b"hidden"], None)
            found = files(tree)
            mode = stat.S_IMODE((root / "d/f").stat().st_mode)
            (root / "d").chmod(0o500)
            try:
                tree.write("d/g", 0o644, [b"x"], None)
                refused = False
            except Obstructed:
                refused = True
            return [sorted(found), mode, refused]

    assert in_child(work) == [["d/f"], 0, True]
