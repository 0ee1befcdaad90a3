from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from carrel.errors import (
    AlreadyExists,
    CarrelError,
    Conflict,
    FileMissing,
    InvalidPath,
    LimitExceeded,
    PlatformError,
    Unsupported,
)
from carrel.supervisor.paths import PATH_LIMIT, Root, refusal, refusing


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Root]:
    (tmp_path / "canary").write_text("outside")
    workspace = tmp_path / "workspace"
    (workspace / "a" / "b").mkdir(parents=True)
    (workspace / "a" / "file").write_text("inside")
    (workspace / "out").symlink_to("..")
    (workspace / "abs").symlink_to(tmp_path)  # were the confinement broken, nothing else may suffer
    (workspace / "to-b").symlink_to("a/b")
    made = Root(str(workspace))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("given_path", "expected"),
    [
        (".", b"."),
        ("./", b"."),
        ("a", b"a"),
        ("a/", b"a"),
        ("./a/./b", b"a/b"),
        ("a/../b", b"a/../b"),
        ("..", b".."),
        ("a\udcff", b"a\xff"),
        ("é", "é".encode()),
        ("a b\n", b"a b\n"),
        ("{root}", b"."),
        ("{root}/", b"."),
        ("{root}/a/file", b"a/file"),
    ],
)
def test_relative(root: Root, tmp_path: Path, given_path: str, expected: bytes) -> None:
    assert root.relative(given_path.replace("{root}", str(tmp_path / "workspace"))) == expected


@pytest.mark.parametrize(
    "path",
    ["", "/", "//", "a//b", "a//", "/etc/passwd", "{root}x/a", "{root}//a", "a\0b", "x/" * 3000, "\ud800"],
)
def test_relative_refuses(root: Root, tmp_path: Path, path: str) -> None:
    with pytest.raises(InvalidPath) as caught:
        root.relative(path.replace("{root}", str(tmp_path / "workspace")), "source")
    assert caught.value.field == "source"


def test_a_root_of_everything_takes_absolute_paths() -> None:
    root = Root("/")
    try:
        assert root.relative("/etc/hosts") == b"etc/hosts"
        assert root.relative("/") == b"."
    finally:
        root.close()


def test_root_must_be_absolute_and_exist(tmp_path: Path) -> None:
    with pytest.raises(InvalidPath):
        Root("relative")
    with pytest.raises(PlatformError):
        Root(str(tmp_path / "missing"))


@pytest.mark.parametrize("path", [b".", b"..", b"a/..", b"to-b/.."])
def test_place_needs_a_name(root: Root, path: bytes) -> None:
    with pytest.raises(InvalidPath):
        root.place(path)


@pytest.mark.parametrize("path", [b"out/canary", b"abs/canary", b"../canary", b"a/../../canary"])
def test_place_and_target_stay_inside(root: Root, path: bytes) -> None:
    for find in (root.place, root.target):
        for parents in (False, True):
            with pytest.raises(InvalidPath, match="leaves the workspace"):
                find(path, parents=parents)


def test_target_follows_links_inside_only(root: Root, tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    (workspace / "a" / "b" / "up").symlink_to("../file")
    (workspace / "chain").symlink_to("to-b//./up")
    with root.target(b"chain") as place:
        found = os.stat(place.name, dir_fd=place.directory, follow_symlinks=False)
        assert found.st_ino == (workspace / "a" / "file").stat().st_ino
    (workspace / "dangling").symlink_to("a/new")
    with root.target(b"dangling") as place:
        assert place.name == b"new"
    for name, text in {
        "x1": "../canary",
        "x2": "/etc/passwd",
        "x3": "x3",
        "x4": "to-b/../../../canary",
    }.items():
        (workspace / name).symlink_to(text)
        with pytest.raises(InvalidPath):
            root.target(name.encode())


def test_parents_are_made_beneath(root: Root, tmp_path: Path) -> None:
    with root.place(b"n/../m/to/file", parents=True) as place:
        assert place.name == b"file"
    assert (tmp_path / "workspace" / "m" / "to").is_dir()
    (tmp_path / "workspace" / "dangling").symlink_to("nowhere")
    with pytest.raises(FileMissing):
        root.place(b"dangling/x", parents=True)
    with pytest.raises(InvalidPath):
        root.place(b"a/file/x/y", parents=True)
    assert sorted(os.listdir(tmp_path)) == ["canary", "workspace"]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOENT, FileMissing),
        (errno.EXDEV, InvalidPath),
        (errno.ELOOP, InvalidPath),
        (errno.ENAMETOOLONG, InvalidPath),
        (errno.ENOSPC, LimitExceeded),
        (errno.EDQUOT, LimitExceeded),
        (errno.EMFILE, LimitExceeded),
        (errno.EEXIST, AlreadyExists),
        (errno.EACCES, Conflict),
        (errno.EROFS, Conflict),
        (errno.EAGAIN, Conflict),
        (errno.ENOSYS, Unsupported),
        (errno.EIO, PlatformError),
    ],
)
def test_refusals(code: int, kind: type[CarrelError]) -> None:
    assert type(refusal(OSError(code, "x"), b"p")) is kind


def test_a_lost_connection_is_not_a_refusal() -> None:
    with pytest.raises(ConnectionResetError), refusing(b"p"):
        raise ConnectionResetError


_PARTS = st.sampled_from(["..", ".", "", "a", "b", "file", "out", "abs", "to-b", "canary", "\0", "é", "\udc80", "new"])
_PATHS = st.one_of(
    st.text(max_size=40),
    st.lists(_PARTS, max_size=8).map("/".join),
    st.lists(_PARTS, max_size=8).map(lambda parts: "/" + "/".join(parts)),
)


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(path=_PATHS, parents=st.booleans())
def test_no_path_escapes(root: Root, tmp_path: Path, path: str, parents: bool) -> None:
    workspace = (tmp_path / "workspace").resolve()

    def inside(handle: int) -> bool:
        return Path(os.readlink(f"/proc/self/fd/{handle}")).is_relative_to(workspace)

    try:
        relative = root.relative(path)
    except InvalidPath:
        return
    assert not relative.startswith(b"/") and len(relative) <= PATH_LIMIT
    try:
        handle = root.open(relative, os.O_PATH)
        assert inside(handle)
        os.close(handle)
    except CarrelError as error:
        assert error.status < 500
    for find in (root.place, root.target):
        try:
            with find(relative, parents=parents) as place:
                assert b"/" not in place.name and place.name not in {b".", b"..", b""}
                assert inside(place.directory)
        except CarrelError as error:
            assert error.status < 500
    assert sorted(os.listdir(tmp_path)) == ["canary", "workspace"]
    assert (tmp_path / "canary").read_text() == "outside"
