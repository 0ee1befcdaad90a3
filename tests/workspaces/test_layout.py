from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.errors import InvalidRequest
from carrel.workspaces.layout import CANONICAL_UID, CONTEXT_FILE, SUBDIRECTORIES, Layout, encode

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}", fullmatch=True)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    layout = Layout(str(tmp_path / "data"))
    layout.prepare()
    return layout


@given(st.lists(st.tuples(NAMES, st.booleans()), unique=True, max_size=20))
def test_encoding_is_one_to_one_and_safe(pairs: list[tuple[str, bool]]) -> None:
    encoded = [encode(name, ephemeral=ephemeral) for name, ephemeral in pairs]
    assert len(set(encoded)) == len(pairs)
    assert all("/" not in each and ":" not in each and len(each) < 200 and each[0] != "." for each in encoded)


@given(st.text(max_size=140))
def test_other_names_are_refused(name: str) -> None:
    try:
        result = encode(name, ephemeral=False)
    except InvalidRequest as error:
        assert error.field == "context_id"
    else:
        assert "/" not in result and "\0" not in result


def test_make(layout: Layout) -> None:
    path, new = layout.make("agent:1", ephemeral=False)
    assert new and path.endswith("/ctx-agent+1")
    assert set(os.listdir(path)) == {*SUBDIRECTORIES, CONTEXT_FILE}
    described = json.loads((Path(path) / CONTEXT_FILE).read_text())
    assert described["context_id"] == "agent:1"
    owner = CANONICAL_UID if os.geteuid() == 0 else os.geteuid()
    for each in (path, *(os.path.join(path, name) for name in os.listdir(path))):
        info = os.stat(each)
        assert info.st_uid == owner
        assert stat.S_IMODE(info.st_mode) & 0o077 == 0
    for each in (layout.data_dir, layout.workspaces, layout.run):
        assert stat.S_IMODE(os.stat(each).st_mode) == 0o700


def test_make_again_keeps_files_and_date(layout: Layout) -> None:
    path, _ = layout.make("a", ephemeral=False)
    first = json.loads((Path(path) / CONTEXT_FILE).read_text())
    (Path(path) / "data" / "kept").write_text("x")
    again, new = layout.make("a", ephemeral=False)
    assert (again, new) == (path, False)
    assert (Path(path) / "data" / "kept").read_text() == "x"
    second = json.loads((Path(path) / CONTEXT_FILE).read_text())
    assert second["created_at"] == first["created_at"]
    assert second["last_accessed_at"] >= first["last_accessed_at"]


def test_a_context_file_that_is_a_trap_is_not_followed(layout: Layout, tmp_path: Path) -> None:
    path, _ = layout.make("a", ephemeral=False)
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (Path(path) / CONTEXT_FILE).unlink()
    (Path(path) / CONTEXT_FILE).symlink_to(victim)
    layout.make("a", ephemeral=False)
    assert victim.read_text() == "untouched"
    (Path(path) / CONTEXT_FILE).unlink()
    (Path(path) / CONTEXT_FILE).mkdir()
    ((Path(path) / CONTEXT_FILE) / "x").write_text("")
    layout.make("a", ephemeral=False)
    os.mkfifo(Path(path) / "fifo")
    assert not [name for name in os.listdir(path) if name.startswith(".context-")]


def test_remove_follows_no_link_and_needs_no_permission(layout: Layout, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    path, _ = layout.make("a", ephemeral=False)
    (Path(path) / "data" / "link").symlink_to(outside)
    (Path(path) / "data" / "loop").symlink_to("loop")
    locked = Path(path) / "data" / "locked" / "deeper"
    locked.mkdir(parents=True)
    (locked / "file").write_text("x")
    locked.chmod(0)
    locked.parent.chmod(0)
    (Path(path) / os.fsdecode(b"\xff\xfe")).write_text("x")
    layout.remove("a", ephemeral=False)
    assert not os.path.exists(path)
    assert (outside / "kept").read_text() == "x"
    assert os.listdir(layout.trash) == []


def test_remove_a_tree_deeper_than_any_path(layout: Layout) -> None:
    path, _ = layout.make("a", ephemeral=True)
    fd = os.open(path, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d" * 20, dir_fd=fd)
        below = os.open("d" * 20, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    layout.remove("a", ephemeral=True)
    assert os.listdir(layout.workspaces) == []
    assert os.listdir(layout.trash) == []


def test_remove_what_is_not_there(layout: Layout) -> None:
    layout.remove("never", ephemeral=False)
    assert os.listdir(layout.trash) == []


def test_leftovers(layout: Layout) -> None:
    layout.make("eph-1", ephemeral=True)
    layout.make("eph-2", ephemeral=True)
    layout.make("eph-3", ephemeral=False)
    assert layout.ephemeral_leftovers({"eph-2"}) == ["eph-1"]
    os.makedirs(os.path.join(layout.trash, "dead", "workspace", "x"))
    layout.empty_trash()
    assert os.listdir(layout.trash) == []
