from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.children import in_child

from carrel.errors import InvalidRequest, LimitExceeded, PlatformError
from carrel.workspaces.environments import EnvironmentStorage, _Copy

PYTHON = "/usr/bin/python3.11"
MB = 1 << 20


@pytest.fixture
def shelf(tmp_path: Path) -> EnvironmentStorage:
    shelf = EnvironmentStorage(str(tmp_path / "envs"))
    shelf.prepare()
    return shelf


@pytest.fixture
def source(tmp_path: Path) -> Path:
    source = tmp_path / "built"
    (source / "bin").mkdir(parents=True)
    (source / "lib").mkdir()
    (source / "bin" / "python").symlink_to(PYTHON)
    (source / "bin" / "python3").symlink_to("python")
    (source / "lib64").symlink_to("lib")
    (source / "lib" / "module.py").write_text("x = 1\n")
    os.utime(source / "lib" / "module.py", (1000, 1000))
    return source


def as_user(work: Callable[[], None]) -> None:
    """Do something as a user who is nobody else."""

    def act() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(64_321, 64_321, 64_321)
            os.setresuid(64_321, 64_321, 64_321)
        work()

    assert in_child(act) is None


def put(shelf: EnvironmentStorage, source: Path, name: str) -> None:
    draft = shelf.take(str(source), PYTHON, most_bytes=MB)
    shelf.sync(draft)
    shelf.place(draft, name)


def empty(shelf: EnvironmentStorage) -> bool:
    return not os.listdir(os.path.join(shelf.directory, "drafts"))


def test_whole_and_with_plain_modes(shelf: EnvironmentStorage, source: Path) -> None:
    (source / "bin" / "tool").write_text("#!/bin/sh\n")
    (source / "bin" / "tool").chmod(0o6711)
    (source / "lib" / "private").write_text("x")
    (source / "lib" / "private").chmod(0o600)
    os.link(source / "lib" / "module.py", source / "lib" / "twin.py")
    draft = shelf.take(str(source), PYTHON, most_bytes=MB)
    draft.write("carrel-env.json", b"{}")
    shelf.sync(draft)
    shelf.place(draft, "one")
    assert shelf.has("one") and empty(shelf)
    there = Path(shelf.path) / "one"
    assert stat.S_IMODE((there / "bin" / "tool").stat().st_mode) == 0o755
    assert stat.S_IMODE((there / "lib" / "private").stat().st_mode) == 0o644
    assert (there / "lib" / "module.py").stat().st_mtime == 1000, "compiled modules know the time of their source"
    assert os.readlink(there / "bin" / "python") == PYTHON and os.readlink(there / "lib64") == "lib"
    assert (there / "lib" / "twin.py").read_text() == "x = 1\n"
    again = shelf.take(str(source), PYTHON, most_bytes=MB)
    shelf.place(again, "one")
    assert empty(shelf)


@pytest.mark.parametrize("points_to", ["/etc", "/usr/bin/python3", "../..", "../x/../../..", "lib/../..", "..//../.."])
def test_a_link_that_leads_out_is_refused(shelf: EnvironmentStorage, source: Path, points_to: str) -> None:
    (source / "lib" / "out").symlink_to(points_to)
    with pytest.raises(InvalidRequest, match="link that leads out"):
        shelf.take(str(source), PYTHON, most_bytes=MB)
    assert empty(shelf)


def test_what_is_no_file_and_what_is_too_much(shelf: EnvironmentStorage, source: Path) -> None:
    os.mkfifo(source / "lib" / "pipe")
    with pytest.raises(InvalidRequest, match="not a file"):
        shelf.take(str(source), PYTHON, most_bytes=MB)
    (source / "lib" / "pipe").unlink()
    (source / "lib" / "huge").touch()
    os.truncate(source / "lib" / "huge", 1 << 40)
    with pytest.raises(LimitExceeded, match="more than 1 MB"):
        shelf.take(str(source), PYTHON, most_bytes=MB)
    (source / "lib" / "huge").unlink()
    for number in range(300):
        (source / "lib" / f"{number}").mkdir()
    with pytest.raises(LimitExceeded):
        shelf.take(str(source), PYTHON, most_bytes=MB)
    assert empty(shelf)


def test_a_description_is_carrels_own(shelf: EnvironmentStorage, source: Path, tmp_path: Path) -> None:
    (source / "carrel-env.json").symlink_to("lib/module.py")
    draft = shelf.take(str(source), PYTHON, most_bytes=MB)
    draft.write("carrel-env.json", b"{}")
    assert Path(draft.path, "lib/module.py").read_text() == "x = 1\n"
    shelf.discard(draft)
    (source / "carrel-env.json").unlink()
    (source / "carrel-env.json").mkdir()
    draft = shelf.take(str(source), PYTHON, most_bytes=MB)
    draft.write("carrel-env.json", b"{}")
    assert Path(draft.path, "carrel-env.json").read_bytes() == b"{}"
    shelf.discard(draft)
    assert empty(shelf)


def test_after_a_restart(shelf: EnvironmentStorage, source: Path) -> None:
    for name in ("known", "unknown"):
        put(shelf, source, name)
    shelf.take(str(source), PYTHON, most_bytes=MB)
    assert not empty(shelf)
    again = EnvironmentStorage(shelf.directory)
    again.prepare()
    assert again.sweep(["known", "lost"]) == ["known"]
    assert empty(shelf) and again.has("known") and not again.has("unknown")
    gone = again.retire("known")
    assert gone is not None and not again.has("known")
    again.remove(gone)
    assert empty(shelf) and again.retire("known") is None
    assert 0 <= again.free() <= 1


def test_nobody_lists_it_but_who_knows_a_name_can_read(shelf: EnvironmentStorage, source: Path, tmp_path: Path) -> None:
    put(shelf, source, "one")
    for path in (tmp_path, tmp_path.parent, Path(shelf.directory)):
        path.chmod(0o755)

    def look() -> None:
        with pytest.raises(PermissionError):
            os.listdir(shelf.path)
        assert Path(shelf.path, "one", "lib", "module.py").read_text() == "x = 1\n"

    as_user(look)


def test_as_an_ordinary_user_its_owner_sweeps_it(tmp_path: Path) -> None:
    place = tmp_path / "own"
    place.mkdir()
    for path in (tmp_path, tmp_path.parent):
        path.chmod(0o755)
    if os.geteuid() == 0:
        os.chown(place, 64_321, 64_321)

    def work() -> None:
        built = place / "built"
        built.mkdir()
        (built / "file").write_text("x")
        shelf = EnvironmentStorage(str(place / "envs"))
        shelf.prepare()
        for name in ("one", "two"):
            put(shelf, built, name)
        with pytest.raises(PermissionError):
            os.listdir(shelf.path)
        assert shelf.sweep(["one"]) == ["one"]
        with pytest.raises(PermissionError):
            os.listdir(shelf.path)
        shelf.close()
        shutil.rmtree(shelf.directory)

    as_user(work)


def test_a_place_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PlatformError):
        EnvironmentStorage(str(tmp_path / "file")).prepare()


@given(
    st.lists(st.sampled_from(["..", ".", "a", "loop", ""]), min_size=1, max_size=6),
    st.lists(st.sampled_from(["d", "e"]), max_size=3),
)
def test_no_link_that_is_taken_leads_out(parts: list[str], folder: list[str]) -> None:
    """Whatever other links there are: `loop` stands for one that leads to the top."""
    if not _Copy(PYTHON, MB)._stays("/".join(parts), "/".join(folder)):
        return
    depth = len(folder)
    for part in parts:
        depth = 0 if part == "loop" else depth - 1 if part == ".." else depth + 1 if part == "a" else depth
        assert depth >= 0
