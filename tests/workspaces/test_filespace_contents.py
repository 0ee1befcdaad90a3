from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from carrel.errors import PlatformError, SnapshotDamaged
from carrel.workspaces.filespace_contents import GRACE_S, Contents
from carrel.workspaces.remote import Remote


@pytest.fixture
def remote(where: str) -> Remote:
    return Remote.open(where)


@pytest.fixture
def contents(tmp_path: Path, remote: Remote) -> Contents:
    (tmp_path / "spool").mkdir()
    return Contents(remote, "ctx-a+b", str(tmp_path / "spool"))


@pytest.fixture
def on_disk(tmp_path: Path) -> Contents:
    (tmp_path / "spool").mkdir()
    return Contents(Remote.open(str(tmp_path / "remote")), "ctx-a+b", str(tmp_path / "spool"))


def kept(contents: Contents, *pieces: bytes) -> str:
    drafting = contents.drafting()
    for piece in pieces:
        drafting.add(piece)
    draft = drafting.finish()
    try:
        contents.keep(draft)
    finally:
        draft.drop()
    return draft.hash


def age(tmp_path: Path, key: str, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(tmp_path / "remote/filespace/ctx-a+b" / key, (then, then))


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1, (9 << 20) + 7])
def test_what_is_kept_is_read(contents: Contents, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    half = size // 2
    key = kept(contents, data[:half], data[half:])
    assert b"".join(contents.read(key, size)) == data
    path = tmp_path / "file"
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    try:
        draft = contents.draft(fd, size)
        draft.drop()
    finally:
        os.close(fd)
    assert (draft.hash, draft.size) == (key, size)
    assert os.listdir(tmp_path / "spool") == []


@pytest.mark.parametrize("size", [10, 9 << 20])
def test_damage_is_named(contents: Contents, remote: Remote, size: int) -> None:
    key = kept(contents, bytes(size))
    name = f"filespace/ctx-a+b/{key}"
    for damaged in (bytes(size - 1), bytes(size - 1) + b"x", b""):
        remote.put(name, damaged)
        with pytest.raises(SnapshotDamaged) as caught:
            list(contents.read(key, size))
        assert caught.value.extra["objects"] == [key] and caught.value.hint
    remote.delete([name])
    with pytest.raises(SnapshotDamaged, match="missing"):
        list(contents.read(key, size))


def test_only_old_contents_that_nobody_names_are_collected(on_disk: Contents, tmp_path: Path) -> None:
    contents = on_disk
    named, young, old, again = (kept(contents, word) for word in (b"named", b"young", b"old", b"again"))
    for key in (named, old, again):
        age(tmp_path, key, GRACE_S + 60)
    assert contents.recent() == {young}
    assert kept(contents, b"again") == again  # who needs it stores it again, and so it is young
    assert contents.recent() == {young, again}
    asked = []

    def names() -> set[str]:
        asked.append(1)
        return {named}

    assert contents.collect(names) == 1 and asked == [1]
    assert {entry for entry in (named, young, again) if list(contents.read(entry, 5))} == {named, young, again}
    with pytest.raises(SnapshotDamaged):
        list(contents.read(old, 3))
    assert contents.collect(names) == 0


def test_everything_can_be_forgotten(contents: Contents) -> None:
    keys = {kept(contents, word) for word in (b"one", b"two")}
    assert contents.recent() == keys and contents.collect(set) == 0
    contents.forget()
    contents.forget()
    assert contents.recent() == set()


def test_a_draft_that_is_given_up_leaves_nothing(on_disk: Contents, tmp_path: Path) -> None:
    contents = on_disk
    drafting = contents.drafting()
    drafting.add(bytes(2 << 20))
    assert drafting.size == 2 << 20 and len(os.listdir(tmp_path / "spool")) == 1
    drafting.drop()
    assert os.listdir(tmp_path / "spool") == []
    (tmp_path / "spool").rmdir()
    with pytest.raises(PlatformError):
        kept(contents, bytes(2 << 20))
