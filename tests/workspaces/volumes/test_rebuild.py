"""A tree written from objects is the tree that was read."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from tests.support.trees_for_tests import mutate, pack_tree, picture

from carrel.errors import SnapshotDamaged
from carrel.primitives import walk
from carrel.workspaces.volumes.capture import capture
from carrel.workspaces.volumes.objects import Batch, ObjectStore, Reader
from carrel.workspaces.volumes.rebuild import rebuild
from carrel.workspaces.volumes.trees import EntryKind, Node, Tree


@pytest.mark.parametrize("seed", range(5))
def test_the_same_tree(tmp_path: Path, seed: int) -> None:
    store = ObjectStore(str(tmp_path / "s"))
    store.prepare()
    for name in ("tree", "copy"):
        (tmp_path / name).mkdir()
    mutate(str(tmp_path / "tree"), random.Random(seed), 60)
    source, target = (os.open(tmp_path / name, walk.DIRECTORY) for name in ("tree", "copy"))
    try:
        with store.shared(), Batch(store) as batch, Reader(store) as reader:
            found = capture(store, batch, source, {}, trusted=True)
            batch.finish()
            known = rebuild(store, reader, found.tree, target, None)
            again = capture(store, batch, target, known, trusted=True)
    finally:
        os.close(source)
        os.close(target)
    assert picture(str(tmp_path / "copy")) == picture(str(tmp_path / "tree"))
    assert again.tree == found.tree


def test_a_size_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path / "s"))
    store.prepare()
    (tmp_path / "copy").mkdir()
    target = os.open(tmp_path / "copy", walk.DIRECTORY)
    try:
        with store.shared(), Batch(store) as batch, Reader(store) as reader:
            part = batch.put(b"12345")
            lie = Node(EntryKind.FILE, 0o600, 0, 3, ((0, 3, part),))
            key = batch.put_packed(pack_tree(Tree(0o700, 0, None, {b"f": lie})))
            batch.finish()
            with pytest.raises(SnapshotDamaged, match="the size of"):
                rebuild(store, reader, key, target, None)
    finally:
        os.close(target)
