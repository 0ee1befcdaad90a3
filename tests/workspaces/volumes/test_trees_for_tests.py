"""The random work on trees stays inside them."""

from __future__ import annotations

import os
import random
from pathlib import Path

from tests.support.trees_for_tests import NAMES, mutate


def test_random_work_never_writes_through_a_link(tmp_path: Path) -> None:
    """It did once: run as root, with a link to a file of the host."""
    outside = tmp_path / "outside"
    outside.write_text("as it was")
    for seed in range(50):
        tree = tmp_path / str(seed)
        tree.mkdir()
        for name in NAMES:
            for number in range(4):
                os.symlink(outside, tree / (name + str(number)))
        mutate(str(tree), random.Random(seed), 40)
    assert outside.read_text() == "as it was"
