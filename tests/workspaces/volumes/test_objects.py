"""Objects are whole, verified, kept once, and collected without harm to others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from carrel.errors import SnapshotDamaged
from carrel.workspaces.volumes.objects import PACKED_MAX, Batch, ObjectStore, Reader, newest_ns, sweep


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    made = ObjectStore(str(tmp_path / "s"))
    made.prepare()
    return made


def put(store: ObjectStore, *contents: bytes) -> list[bytes]:
    with store.shared(), Batch(store) as batch:
        keys = [batch.put(content) for content in contents]
        batch.finish()
    return keys


def test_content_comes_back_and_is_kept_once(store: ObjectStore) -> None:
    contents = [b"", b"x", b"text " * 1000, os.urandom(5000), os.urandom(PACKED_MAX + 1), bytes(PACKED_MAX + 1)]
    keys = put(store, *contents, *contents)
    other = ObjectStore(store.root)
    with other.shared(), Reader(other) as reader:
        assert [reader.read(key) for key in keys] == contents * 2
    with store.shared(), Batch(store) as batch:
        for content in contents:
            batch.put(content)
        batch.finish()
        assert batch.stored == 0


def test_what_is_not_finished_leaves_no_trace(store: ObjectStore) -> None:
    with store.shared(), Batch(store) as batch:
        key = batch.put(b"x" * 100)
    assert os.listdir(store.temporary) == []
    with store.shared(), Reader(store) as reader, pytest.raises(SnapshotDamaged, match=key.hex()):
        reader.read(key)


def test_the_sweep_waits_for_writers(store: ObjectStore) -> None:
    with store.shared(), store.exclusive(wait=False) as held:
        assert not held
    with store.exclusive(wait=False) as held:
        assert held


def test_a_second_copy_serves_when_the_first_is_damaged(store: ObjectStore) -> None:
    [key] = put(store, b"precious" * 50)
    with store.shared():
        store.mark_damaged([key])
    assert put(store, b"precious" * 50) == [key]
    packs = sorted(Path(store.root, "packs").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert len(packs) == 2
    packs[0].chmod(0o600)
    raw = bytearray(packs[0].read_bytes())
    raw[12] ^= 1
    packs[0].write_bytes(raw)
    other = ObjectStore(store.root)
    with other.shared(), Reader(other) as reader:
        assert reader.read(key) == b"precious" * 50


def test_a_sweep_keeps_what_lives_and_others_see_it(store: ObjectStore) -> None:
    keep, lose = put(store, b"keep" * 10, os.urandom(9000))
    big_keep, big_lose = put(store, os.urandom(PACKED_MAX * 2), os.urandom(PACKED_MAX * 2))
    other = ObjectStore(store.root)
    other.refresh()
    before = store.generation()
    with store.exclusive():
        collected = sweep(store, {keep, big_keep})
    assert collected.objects == 2
    assert store.generation() != before
    with other.shared(), Reader(other) as reader:
        assert reader.read(keep) == b"keep" * 10
        assert len(reader.read(big_keep)) == PACKED_MAX * 2
        for gone in (lose, big_lose):
            with pytest.raises(SnapshotDamaged):
                reader.read(gone)


def test_what_is_as_old_as_it_must_be_is_kept(store: ObjectStore) -> None:
    assert newest_ns(store) == 0
    small, big = put(store, os.urandom(9000), os.urandom(PACKED_MAX * 2))
    [mixed, _] = put(store, os.urandom(100), os.urandom(9000))
    keep_ns = newest_ns(store)
    for path in Path(store.root).glob("*s/**/*"):
        if path.is_file():
            assert path.stat().st_mtime_ns <= keep_ns
    with store.exclusive():
        assert sweep(store, {mixed}, keep_ns).objects == 0
    with store.shared(), Reader(store) as reader:
        for key in (small, big, mixed):
            reader.read(key)
    with store.exclusive():
        assert sweep(store, {mixed}, keep_ns - 1).objects >= 1
