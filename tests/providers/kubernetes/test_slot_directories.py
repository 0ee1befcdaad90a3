"""The directory of a slot becomes a workspace, or nothing happens."""

from __future__ import annotations

import os

import pytest

from carrel.providers.kubernetes.slot_directories import SlotDirectories, is_empty


@pytest.fixture
def slots(tmp_path):
    return SlotDirectories(str(tmp_path), "one", os.getuid())


def test_a_directory_keeps_what_it_is_under_its_new_name(slots, tmp_path):
    path = tmp_path / slots.make("slot")
    assert (path.stat().st_mode & 0o777, path.stat().st_uid) == (0o700, os.getuid())
    inode = path.stat().st_ino
    (tmp_path / "workspace").mkdir()
    slots.give("slot", str(tmp_path / "workspace"))
    assert (tmp_path / "workspace").stat().st_ino == inode
    slots.remove("slot")
    slots.close()
    assert os.listdir(tmp_path) == ["workspace"]


def test_a_workspace_with_files_is_not_replaced(slots, tmp_path):
    slots.make("slot")
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace/file").write_text("first")
    with pytest.raises(OSError, match="not empty"):
        slots.give("slot", str(tmp_path / "workspace"))
    assert (tmp_path / "workspace/file").read_text() == "first"


def test_slots_of_another_server_stay(slots, tmp_path):
    other = SlotDirectories(str(tmp_path), "two", os.getuid())
    slots.make("slot")
    other.make("slot")
    slots.remove("slot")
    slots.remove("slot")
    slots.close()
    assert os.listdir(tmp_path / ".carrel-slots") == ["two"]


def test_what_is_empty(tmp_path):
    assert is_empty(str(tmp_path))
    (tmp_path / ".hidden").touch()
    assert not is_empty(str(tmp_path))
    assert not is_empty(str(tmp_path / "missing"))
