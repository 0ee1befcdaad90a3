"""The directory of a slot becomes a workspace, or nothing happens."""

from __future__ import annotations

import functools
import os

import pytest

from carrel.primitives import libc
from carrel.providers.kubernetes.slot_directories import SlotDirectories, is_small


@pytest.fixture
def slots(tmp_path):
    return SlotDirectories(str(tmp_path), "one", os.getuid())


@pytest.fixture(params=[True, False], ids=["exchange", "two renames"])
def exchanges(request, monkeypatch):
    """File systems that can exchange two names, and those that cannot."""
    if not request.param:
        monkeypatch.setattr(libc, "exchange", lambda *_: False)


@pytest.fixture
def workspace(tmp_path):
    made = tmp_path / "workspace"
    (made / "data/deep").mkdir(parents=True)
    (made / "data").chmod(0o750)
    (made / ".context.json").write_text("{}")
    (made / ".context.json").chmod(0o640)
    return made


def content(folder):
    return {
        str(path.relative_to(folder)): (path.stat().st_mode, path.read_text() if path.is_file() else "")
        for path in folder.rglob("*")
    }


def test_a_directory_keeps_what_it_is_under_its_new_name(slots, tmp_path, workspace, exchanges):
    path = tmp_path / slots.make("slot")
    assert (path.stat().st_mode & 0o777, path.stat().st_uid) == (0o700, os.getuid())
    inode, before = path.stat().st_ino, content(workspace)
    slots.give("slot", str(workspace))
    assert workspace.stat().st_ino == inode
    assert content(workspace) == before
    slots.remove("slot")
    slots.close()
    assert os.listdir(tmp_path) == ["workspace"]


def test_a_kill_at_any_point_loses_nothing(slots, tmp_path, workspace, monkeypatch):
    monkeypatch.setattr(libc, "exchange", lambda *_: False)
    before, calls = content(workspace), 0
    for step in range(20):
        slots.make(f"slot-{step}")
        left = step

        def stop(real, *words, **more):
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            return real(*words, **more)

        with monkeypatch.context() as dying:
            for name in ("rename", "symlink", "unlink", "mkdir"):
                real = getattr(os, name)
                dying.setattr(os, name, functools.partial(stop, real))
            try:
                slots.give(f"slot-{step}", str(workspace))
            except KeyboardInterrupt:
                calls += 1
        SlotDirectories(str(tmp_path), "one", os.getuid()).recover()
        assert content(workspace) == before, step
    assert 5 <= calls < 20
    slots.close()
    assert os.listdir(tmp_path) == ["workspace"]


def test_a_workspace_with_much_is_not_replaced(slots, workspace):
    slots.make("slot")
    for number in range(100):
        (workspace / f"file-{number}").touch()
    before = content(workspace)
    with pytest.raises(OSError, match="too much"):
        slots.give("slot", str(workspace))
    assert content(workspace) == before


def test_slots_of_another_server_stay(slots, tmp_path):
    other = SlotDirectories(str(tmp_path), "two", os.getuid())
    slots.make("slot")
    other.make("slot")
    slots.remove("slot")
    slots.remove("slot")
    slots.close()
    assert os.listdir(tmp_path / ".carrel-slots") == ["two"]


def test_what_is_small(tmp_path, workspace):
    assert is_small(str(workspace))
    assert not is_small(str(tmp_path / "missing"))
    os.mkfifo(workspace / "pipe")
    assert not is_small(str(workspace))
    (workspace / "pipe").unlink()
    (workspace / "link").symlink_to("/etc/passwd")
    assert not is_small(str(workspace))
    (workspace / "link").unlink()
    os.link(workspace / ".context.json", workspace / "same")
    assert not is_small(str(workspace))
    (workspace / "same").unlink()
    (workspace / "large").write_bytes(bytes(2 << 20))
    assert not is_small(str(workspace))
