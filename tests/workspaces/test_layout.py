from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.errors import InvalidRequest, PlatformError
from carrel.primitives.trees import empty_directory
from carrel.workspaces.layout import CANONICAL_UID, CONTEXT_FILE, SUBDIRECTORIES, Layout, WorkspaceFacts, encode

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


def workspace(layout: Layout, name: str, *, ephemeral: bool = False) -> Path:
    """A workspace as a driver and the layout make it together."""
    path = Path(layout.storage) / encode(name, ephemeral=ephemeral)
    new = not path.exists()
    if new:
        path.mkdir(mode=0o700)
        if os.geteuid() == 0:
            os.chown(path, CANONICAL_UID, CANONICAL_UID)
    layout.prepare_workspace(
        str(path), WorkspaceFacts(None if ephemeral else name, "agent", "coder", None, 3, 17), new=new
    )
    return path


def test_prepare_workspace(layout: Layout) -> None:
    path = workspace(layout, "agent:1")
    assert set(os.listdir(path)) == {*SUBDIRECTORIES, CONTEXT_FILE}
    described = json.loads((path / CONTEXT_FILE).read_text())
    assert described["context_id"] == "agent:1"
    assert (described["ttl_days"], described["disk_usage_bytes"]) == (3, 17)
    assert (described["namespace"], described["agent"]) == ("agent", "coder")
    layout.describe(str(path), WorkspaceFacts("agent:1", "agent", "coder", 86_400.0, 3, 99))
    described = json.loads((path / CONTEXT_FILE).read_text())
    assert (described["disk_usage_bytes"], described["last_accessed_at"]) == (99, "1970-01-02T00:00:00+00:00")
    owner = CANONICAL_UID if os.geteuid() == 0 else os.geteuid()
    for each in (path, *(path / name for name in os.listdir(path))):
        info = os.stat(each)
        assert info.st_uid == owner
        assert stat.S_IMODE(info.st_mode) & 0o077 == 0
    for each in (layout.data_dir, layout.storage, layout.run):
        assert stat.S_IMODE(os.stat(each).st_mode) == 0o700


def test_prepare_workspace_again_keeps_files_and_date(layout: Layout) -> None:
    path = workspace(layout, "a")
    first = json.loads((path / CONTEXT_FILE).read_text())
    (path / "data" / "kept").write_text("x")
    assert workspace(layout, "a") == path
    assert (path / "data" / "kept").read_text() == "x"
    second = json.loads((path / CONTEXT_FILE).read_text())
    assert second["created_at"] == first["created_at"]
    assert second["last_accessed_at"] >= first["last_accessed_at"]


def test_a_context_file_that_is_a_trap_is_not_followed(layout: Layout, tmp_path: Path) -> None:
    path = workspace(layout, "a")
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (path / CONTEXT_FILE).unlink()
    (path / CONTEXT_FILE).symlink_to(victim)
    workspace(layout, "a")
    assert victim.read_text() == "untouched"
    (path / CONTEXT_FILE).unlink()
    (path / CONTEXT_FILE).mkdir()
    ((path / CONTEXT_FILE) / "x").write_text("")
    workspace(layout, "a")
    new = path / f"{CONTEXT_FILE}.new"
    new.mkdir()
    workspace(layout, "a")
    assert new.is_dir(), "a directory in the place of the new file does not brick the workspace"
    new.rmdir()
    new.symlink_to(victim)
    shutil.rmtree(path / CONTEXT_FILE)
    workspace(layout, "a")
    assert victim.read_text() == "untouched" and json.loads((path / CONTEXT_FILE).read_text())["agent"] == "coder"
    os.mkfifo(path / "fifo")
    assert not [name for name in os.listdir(path) if name.startswith(".context-")]


def test_the_name_of_the_server_is_made_once(layout: Layout) -> None:
    name = layout.node()
    assert name.startswith("node-")
    assert Layout(layout.data_dir).node() == name
    (Path(layout.data_dir) / "node").write_bytes(b"\xff not a name")
    with pytest.raises(PlatformError):
        layout.node()


def test_emptying_follows_no_link_and_needs_no_permission(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    top = tmp_path / "top"
    locked = top / "data" / "locked" / "deeper"
    locked.mkdir(parents=True)
    (top / "data" / "link").symlink_to(outside)
    (top / "data" / "loop").symlink_to("loop")
    (locked / "file").write_text("x")
    locked.chmod(0)
    locked.parent.chmod(0)
    (top / os.fsdecode(b"\xff\xfe")).write_text("x")
    _empty(top)
    assert os.listdir(top) == []
    assert (outside / "kept").read_text() == "x"


def test_emptying_a_tree_deeper_than_any_path(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d" * 20, dir_fd=fd)
        below = os.open("d" * 20, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    _empty(tmp_path)
    assert os.listdir(tmp_path) == []


def _empty(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        empty_directory(fd)
    finally:
        os.close(fd)
