"""The root of the zygote is entered for good, so each test does it in a fork, and looks around from there."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.sandboxes import KINDS

from carrel.isolation import linux, zygote_root
from carrel.isolation.sandbox import BASE, COVERS
from carrel.primitives import libc

pytestmark = pytest.mark.skipif("namespace" not in KINDS, reason="this host cannot make such sandboxes")
ROOT = os.geteuid() == 0


@pytest.fixture
def workspaces() -> Iterator[Path]:
    """Open to every user, unlike the directories pytest makes, and below the place of the zygote_root."""
    above = Path(tempfile.mkdtemp(prefix="s"))
    above.chmod(0o755)
    (above / "ws" / "w1").mkdir(parents=True)
    (above / "ws" / "w1" / "file").write_text("kept")
    yield above / "ws"
    shutil.rmtree(above)


def seen(workspaces: Path, look: Callable[[], object]) -> None:
    """Enter in a fork, then check from there; what fails there fails here."""

    def action() -> None:
        zygote_root.enter(str(workspaces), root=ROOT)
        look()

    reason = linux.attempt(action, timeout_s=20)
    assert reason is None, reason


def test_it_holds_the_base_the_workspaces_covers_and_proc_and_no_more(workspaces: Path) -> None:
    def mounts() -> list[str]:  # those of other tests come and go
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
        return [line for line in lines if "/ct-" not in line or str(workspaces.parent) in line]

    before = mounts()

    def look() -> None:
        places = ("/proc", BASE, COVERS, zygote_root.WORKSPACES)
        assert sorted(os.listdir("/")) == sorted(place.strip("/") for place in places)
        assert os.getcwd() == "/"
        assert os.listdir(zygote_root.WORKSPACES) == ["w1"]
        assert Path(zygote_root.WORKSPACES, "w1", "file").read_text() == "kept"
        assert Path(BASE, "usr").is_dir() and Path(BASE, "bin").exists()
        for name in ("root", "home", "boot", "srv", "mnt"):
            found = Path(BASE, name)
            assert not found.exists() or {each.name for each in found.iterdir()} <= {"agent", "user"}, name
        assert not Path(str(workspaces)).exists(), "paths of the host lead nowhere"

    seen(workspaces, look)
    assert mounts() == before, "the host has the mounts it had"


def test_mounts_are_few_and_private(workspaces: Path) -> None:
    def look() -> None:
        lines = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        points = [line[4] for line in lines]
        assert {"/", BASE, "/proc", zygote_root.WORKSPACES} <= set(points)
        outside = [p for p in points if p != "/" and not p.startswith((BASE, "/proc", zygote_root.WORKSPACES))]
        assert outside == []
        assert not [line for line in lines if any(word.startswith(("shared:", "master:")) for word in line[6:-4])]

    seen(workspaces, look)


def test_the_base_cannot_be_written(workspaces: Path) -> None:
    def look() -> None:
        for place in (BASE, f"{BASE}/usr", f"{BASE}/etc"):
            try:
                Path(place, "x").write_text("x")
            except OSError as error:
                assert error.errno in {errno.EROFS, errno.EACCES}, error
            else:
                raise AssertionError(f"{place} can be written")
        Path(zygote_root.WORKSPACES, "w1", "new").write_text("made there")

    seen(workspaces, look)
    assert (workspaces / "w1" / "new").read_text() == "made there"


def test_an_ordinary_user_becomes_root_of_a_namespace_of_its_own(workspaces: Path) -> None:
    def action() -> None:
        if ROOT:
            os.setgroups([])
            os.setresgid(12345, 12345, 12345)
            os.setresuid(12345, 12345, 12345)
            libc.prctl(linux.PR_SET_DUMPABLE, 1)  # else /proc/self belongs to root still
        uid = os.geteuid()
        zygote_root.enter(str(workspaces), root=False)
        assert (os.geteuid(), os.getegid()) == (0, 0)
        assert Path("/proc/self/uid_map").read_text().split() == ["0", str(uid), "1"]
        assert Path("/proc/self/setgroups").read_text() == "deny\n"
        assert sorted(os.listdir("/")) == ["base", "covers", "proc", "workspaces"]

    reason = linux.attempt(action, timeout_s=20)
    assert reason is None, reason


def test_workspaces_that_are_not_there_are_told_of() -> None:
    reason = linux.attempt(lambda: zygote_root.enter("/no/such/workspaces", root=ROOT))
    assert reason is not None and "open_tree" in reason
