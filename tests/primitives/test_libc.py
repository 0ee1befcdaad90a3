from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from carrel.primitives.libc import chmod_directory, open_beneath, rename_new


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "outside").write_text("secret")
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "file").write_text("inside")
    (root / "absolute").symlink_to(tmp_path / "outside")
    (root / "relative").symlink_to("../outside")
    (root / "good").symlink_to("sub/../sub/file")
    (root / "loop").symlink_to("loop")
    return root


@pytest.fixture
def fd(tree: Path) -> Iterator[int]:
    handle = os.open(tree, os.O_PATH | os.O_DIRECTORY)
    yield handle
    os.close(handle)


@pytest.mark.parametrize("path", [b"sub/file", b"good", b"sub/../good"])
def test_open_beneath_finds_what_is_inside(fd: int, path: bytes) -> None:
    handle = open_beneath(fd, path, os.O_RDONLY)
    try:
        assert os.read(handle, 100) == b"inside"
        assert not os.get_inheritable(handle)
    finally:
        os.close(handle)


@pytest.mark.parametrize(
    ("path", "code"),
    [
        (b"..", errno.EXDEV),
        (b"../outside", errno.EXDEV),
        (b"sub/../../outside", errno.EXDEV),
        (b"/etc/passwd", errno.EXDEV),
        (b"absolute", errno.EXDEV),
        (b"relative", errno.EXDEV),
        (b"loop", errno.ELOOP),
        (b"missing", errno.ENOENT),
        (b"sub/file/x", errno.ENOTDIR),
        (b"x" * 300, errno.ENAMETOOLONG),
    ],
)
def test_open_beneath_refuses(fd: int, path: bytes, code: int) -> None:
    with pytest.raises(OSError) as caught:
        open_beneath(fd, path, os.O_RDONLY)
    assert caught.value.errno == code


def test_open_beneath_refuses_magic_links() -> None:
    proc = os.open("/proc/self", os.O_PATH | os.O_DIRECTORY)
    try:
        with pytest.raises(OSError) as caught:
            open_beneath(proc, b"root/etc", os.O_RDONLY)
        assert caught.value.errno in {errno.ELOOP, errno.EXDEV}
    finally:
        os.close(proc)


def test_rename_new_never_replaces(tree: Path, fd: int) -> None:
    (tree / "a").write_text("a")
    (tree / "b").write_text("b")
    with pytest.raises(FileExistsError):
        rename_new(fd, b"a", fd, b"b")
    rename_new(fd, b"a", fd, b"c")
    assert (tree / "b").read_text() == "b"
    assert (tree / "c").read_text() == "a"


def test_chmod_directory_changes_directories_only(tree: Path, fd: int) -> None:
    chmod_directory(fd, b"sub", 0o711)
    assert stat.S_IMODE((tree / "sub").stat().st_mode) == 0o711
    (tree / "link").symlink_to("sub")
    with pytest.raises(OSError):
        chmod_directory(fd, b"link", 0o777)
    assert stat.S_IMODE((tree / "sub").stat().st_mode) == 0o711


def test_no_descriptor_is_left(tree: Path, fd: int) -> None:
    before = os.listdir("/proc/self/fd")
    for path in (b"..", b"missing", b"loop"):
        with pytest.raises(OSError):
            open_beneath(fd, path, os.O_RDONLY)
    chmod_directory(fd, b"sub", 0o755)
    assert len(os.listdir("/proc/self/fd")) == len(before)
