"""What is known of a tree survives the disk, and is not believed when it is torn."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from tests.support.trees_for_tests import mutate

from carrel.primitives import walk
from carrel.workspaces.volumes.capture import FRESH_NS, capture, pack_known, unpack_known
from carrel.workspaces.volumes.objects import Batch, ObjectStore


@pytest.mark.parametrize("fresh", [True, False])
def test_equal_trees_have_equal_names_and_what_is_known_comes_back(tmp_path: Path, fresh: bool) -> None:
    store = ObjectStore(str(tmp_path / "s"))
    store.prepare()
    tree = tmp_path / "tree"
    tree.mkdir()
    mutate(str(tree), random.Random(4), 60)
    changed = time.time_ns()
    while not fresh and time.time_ns() - changed < 2 * FRESH_NS:
        time.sleep(0.005)
    root = os.open(tree, walk.DIRECTORY)
    try:
        with store.shared(), Batch(store) as batch:
            first = capture(store, batch, root, {}, trusted=True)
            second = capture(store, batch, root, first.known, trusted=False)
            batch.finish()
            raw = pack_known(first.known, "g")
            known, generation = unpack_known(raw)
            third = capture(store, batch, root, known, trusted=True)
    finally:
        os.close(root)
    assert first.tree == second.tree == third.tree
    assert (first.bytes, first.files) == (second.bytes, second.files) == (third.bytes, third.files)
    assert generation == "g"
    assert known.keys() == first.known.keys()
    for torn in (b"", raw[:-1], raw[:40], raw[:50] + bytes([raw[50] ^ 1]) + raw[51:]):
        assert unpack_known(torn) == ({}, "")
