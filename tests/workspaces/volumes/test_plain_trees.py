"""Plain trees compared and read."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from tests.support.trees_for_tests import mutate, picture

from carrel.primitives import walk
from carrel.workspaces.volumes import Change, ChangeKind, plain_trees


def test_copies_are_equal_until_one_changes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "d").mkdir(parents=True)
        (tmp_path / name / "d" / "f").write_text("same")
        (tmp_path / name / "l").symlink_to("d")
        (tmp_path / name / "x").write_text("same")
    one, other = (os.open(tmp_path / name, walk.DIRECTORY) for name in ("a", "b"))
    try:
        assert plain_trees.compare(one, other) == []
        (tmp_path / "b" / "d" / "f").write_text("Same")
        os.setxattr(tmp_path / "b" / "x", "user.x", b"1")
        (tmp_path / "b" / "l").unlink()
        assert plain_trees.compare(one, other) == [
            Change(b"d/f", ChangeKind.CHANGED),
            Change(b"l", ChangeKind.REMOVED),
            Change(b"x", ChangeKind.CHANGED),
        ]
    finally:
        os.close(one)
        os.close(other)


@pytest.mark.parametrize("seed", range(5))
def test_the_same_tree(tmp_path: Path, seed: int) -> None:
    for name in ("tree", "copy"):
        (tmp_path / name).mkdir()
    mutate(str(tmp_path / "tree"), random.Random(seed), 60)
    os.mkfifo(tmp_path / "tree" / "fifo")
    source, target = (os.open(tmp_path / name, walk.DIRECTORY) for name in ("tree", "copy"))
    try:
        plain_trees.copy_tree(source, target, None)
    finally:
        os.close(source)
        os.close(target)
    assert picture(str(tmp_path / "copy")) == picture(str(tmp_path / "tree"))
