"""A copy is the same tree."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from tests.support.trees_for_tests import mutate, picture

from carrel.workspaces.volumes import kernel
from carrel.workspaces.volumes.copying import copy_tree


@pytest.mark.parametrize("seed", range(5))
def test_the_same_tree(tmp_path: Path, seed: int) -> None:
    for name in ("tree", "copy"):
        (tmp_path / name).mkdir()
    mutate(str(tmp_path / "tree"), random.Random(seed), 60)
    os.mkfifo(tmp_path / "tree" / "fifo")
    source, target = (os.open(tmp_path / name, kernel.DIRECTORY) for name in ("tree", "copy"))
    try:
        copy_tree(source, target, None)
    finally:
        os.close(source)
        os.close(target)
    assert picture(str(tmp_path / "copy")) == picture(str(tmp_path / "tree"))
