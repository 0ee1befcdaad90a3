from __future__ import annotations

import os
from pathlib import Path

from tests.support.nesting import nested

from carrel.workspaces.usage import Usage, max_entries, measure, scan, verdict


def test_counts_blocks_and_entries(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(b"x" * 100_000)
    usage = scan(str(tmp_path))
    assert usage.entries == 2
    assert usage.complete
    assert 100_000 <= usage.bytes < 200_000


def test_sparse_files_count_what_they_take(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(10**9)
    assert scan(str(tmp_path)).bytes < 10**6


def test_hard_links_count_once_and_links_are_not_followed(tmp_path: Path) -> None:
    tree, outside = tmp_path / "tree", tmp_path / "outside"
    tree.mkdir()
    outside.mkdir()
    (outside / "big").write_bytes(b"x" * 1_000_000)
    (tree / "one").write_bytes(b"x" * 500_000)
    os.link(tree / "one", tree / "two")
    (tree / "away").symlink_to(outside)
    usage = scan(str(tree))
    assert usage.entries == 3
    assert usage.bytes < 600_000


def test_stops_early(tmp_path: Path) -> None:
    for number in range(50):
        (tmp_path / str(number)).write_bytes(b"x")
    usage = scan(str(tmp_path), stop_entries=10)
    assert usage.entries == 11
    assert not usage.complete


def test_scan_counts_what_lies_deeper_than_any_path(tmp_path: Path) -> None:
    with nested(tmp_path, 2000, beside=True):
        usage = scan(str(tmp_path))
    assert (usage.entries, usage.complete) == (4000, True)


async def test_leaves_no_descriptor(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    await measure(str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    await measure(str(tmp_path))
    await measure(str(tmp_path), stop_entries=1)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not (await measure(str(tmp_path / "absent"))).complete


def test_verdict() -> None:
    assert verdict(Usage(10, 10, True, 0.1), 1) is None
    assert "1 MB" in (verdict(Usage(2**20 + 1, 10, True, 0.1), 1) or "")
    assert verdict(Usage(1, max_entries(1) + 1, True, 0.1), 1)
    assert verdict(Usage(1, 1, False, 0.1), 1)
    assert max_entries(1) == 10_000
    assert max_entries(1024) == 204_800
