"""Objects that nothing needs go, the rest stays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from carrel.errors import SnapshotDamaged
from carrel.workspaces.volumes.objects import PACKED_MAX, Batch, ObjectStore, Reader
from carrel.workspaces.volumes.sweeping import newest_ns, sweep


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    made = ObjectStore(str(tmp_path / "s"))
    made.prepare()
    return made


def put(store: ObjectStore, *contents: bytes) -> list[bytes]:
    with store.shared(), Batch(store) as batch:
        keys = [batch.put(data) for data in contents]
        batch.finish()
    return keys


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
