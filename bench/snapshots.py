"""Snapshots of a workspace of 1 GB in 20,000 files, compared with `tar | zstd -1` of the same tree on the same disk.

`CARREL_BENCH_MB` makes the workspace smaller. Everything written so far is on the disk before each measurement.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from bench import ground
from bench.measure import BenchFailed, Figures, Progress, Report, Table, median, paired_ratio
from carrel.primitives import libc
from carrel.workspaces.layout import CANONICAL_UID
from carrel.workspaces.volumes import BtrfsDriver, DirectoryDriver, VolumeDriver
from carrel.workspaces.volumes.directory import opened
from carrel.workspaces.volumes.plain_trees import copy_tree

MEGABYTES = int(os.environ.get("CARREL_BENCH_MB", "1000"))
FILES = MEGABYTES * 20
AGAIN = 5
RESTORES = 3
FORKS = 20
TIMED = 10
STEPS = 5
FRESH_S = 0.05


async def run(progress: Progress) -> Report:
    """Measure."""
    for program in ("tar", "zstd"):
        if shutil.which(program) is None:
            raise BenchFailed(f"{program} is not installed; run `make setup` as root")
    async with ground.scratch() as place:
        return await asyncio.to_thread(_run, place, progress)


def _run(place: Path, progress: Progress) -> Report:
    driver = DirectoryDriver(str(place / "store"))
    driver.open()
    driver.create("w", None)
    tree = driver.path("w")
    paths = build(tree, FILES, MEGABYTES * 1_000_000)
    progress(1, STEPS)
    archive = place / "tree.tar.zst"
    packed = _timed(lambda: _shell(f"tar -C {tree} -cf - . | zstd -1 -q > {archive}"))
    first = _timed(lambda: driver.snapshot("w", "first"))
    again = []
    for number in range(AGAIN):
        _change(paths, number)
        again.append(_timed(lambda number=number: driver.snapshot("w", f"again{number}")))  # type: ignore[misc]
    progress(2, STEPS)
    restores, extractions = _restores(place, driver, archive)
    progress(3, STEPS)
    forks = _directory_forks(place)
    progress(4, STEPS)
    figures: Figures = {
        "snapshot_first_s": first,
        "snapshot_again_ms": median(again) * 1000,
        "snapshot_tar_zstd_s": packed,
        "snapshot_again_vs_first": median(again) / first,
        "snapshot_again_vs_tar": median(again) / packed,
        "restore_s": median(restores),
        "restore_vs_tar": paired_ratio(restores, extractions),
        "forks20_bytes_ratio": forks,
    }
    table = Table(f"{MEGABYTES} MB in {FILES} files", ("", "seconds", "× tar"))
    table.add("tar | zstd -1", packed, 1.0)
    table.add("first snapshot, directory driver", first, first / packed)
    table.add("again, 10 files changed", median(again), median(again) / packed)
    table.add("zstd | tar extraction", median(extractions), 1.0)
    table.add("restore, directory driver", median(restores), figures["restore_vs_tar"])
    if BtrfsDriver(str(place / "pool")).missing() is None:
        figures |= _btrfs(place, tree, paths, table)
        figures["forks20_bytes_ratio"] = max(forks, float(figures["forks20_bytes_ratio_btrfs"]))
    progress(STEPS, STEPS)
    return Report(figures, [table])


def _timed(work: Callable[[], object]) -> float:
    os.sync()
    time.sleep(FRESH_S)  # wait until a change is visible in a file's times
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _shell(command: str) -> None:
    subprocess.run(["bash", "-o", "pipefail", "-c", command], check=True)


def build(root: str, files: int, total: int) -> list[str]:
    """Make a tree of mixed sizes, half text and half random bytes; return the paths of its files."""
    rng = random.Random(1)
    words = [bytes(rng.choices(b"abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 10))) for _ in range(2000)]
    sources = (b" ".join(rng.choices(words, k=400_000)), rng.randbytes(4 << 20))
    sizes = [rng.lognormvariate(9, 1.6) for _ in range(files)]
    scale = total / sum(sizes)
    paths = []
    for number, size in enumerate(sizes):
        folder = f"{root}/{number // 1000}/{number // 40 % 25}"
        if number % 40 == 0:
            os.makedirs(folder, exist_ok=True)
        paths.append(f"{folder}/{number}")
        source, left = sources[number % 2], max(1, int(size * scale))
        with open(paths[-1], "wb") as file:
            while left > 0:
                start = rng.randrange(len(source) // 2)
                left -= file.write(source[start : start + left])
    return paths


def _change(paths: list[str], turn: int) -> None:
    for path in random.Random(turn).sample(paths, 10):
        with open(path, "ab") as file:
            file.write(b"changed in turn %d" % turn)


def _restores(place: Path, driver: VolumeDriver, archive: Path) -> tuple[list[float], list[float]]:
    ours, theirs = [], []
    for number in range(RESTORES):
        out = place / f"out{number}"
        out.mkdir()
        driver.create(f"r{number}", None)

        def extract(out: Path = out) -> None:
            theirs.append(_timed(lambda: _shell(f"zstd -dcq {archive} | tar -C {out} -xf -")))

        def restore(number: int = number) -> None:
            ours.append(_timed(lambda: driver.restore(f"r{number}", "first")))

        # In turns, without removals in between: ext4 creates files slowly where many were just deleted.
        for work in (extract, restore) if number % 2 == 0 else (restore, extract):
            work()
    return ours, theirs


def _directory_forks(place: Path) -> float:
    """Measure forks as copies on the disk; only their snapshots add to the storage."""
    driver = DirectoryDriver(str(place / "forks"))
    driver.open()
    driver.create("w", None)
    build(driver.path("w"), FILES // 50, MEGABYTES * 20_000)
    driver.snapshot("w", "first")
    stored = [_stored(place / "forks")]
    for number in range(FORKS):
        driver.fork("first", f"f{number}", None)
        driver.snapshot(f"f{number}", f"s{number}", "first")
    stored.append(_stored(place / "forks"))
    return stored[1] / stored[0]


def _stored(root: Path) -> int:
    kinds = ("objects", "packs", "snapshots")
    return sum(path.stat().st_blocks * 512 for kind in kinds for path in (root / kind).rglob("*") if path.is_file())


def _stored_btrfs(driver: BtrfsDriver) -> int:
    with opened(driver.directory) as directory:
        libc.sync(directory)
    facts = os.statvfs(driver.directory)
    return (facts.f_blocks - facts.f_bfree) * facts.f_frsize


def _btrfs(place: Path, tree: str, paths: list[str], table: Table) -> Figures:
    driver = BtrfsDriver(str(place / "pool"), pool_bytes=max(4 * MEGABYTES, 256) * 1_000_000)
    driver.open()
    try:
        driver.create("w", None)
        with driver.replacing("w") as aside, opened(tree) as source, opened(aside) as target:
            copy_tree(source, target, CANONICAL_UID)
        paths = [path.replace(tree, driver.path("w"), 1) for path in paths]
        driver.snapshot("w", "first")
        before = _stored_btrfs(driver)
        snapshots, forks = [], []
        for number in range(FORKS):
            if number >= TIMED:
                driver.fork("first", f"f{number}", 10**12)
                continue
            _change(paths, number)
            snapshots.append(_timed(lambda number=number: driver.snapshot("w", f"s{number}")))  # type: ignore[misc]
            forks.append(_timed(lambda number=number: driver.fork("first", f"f{number}", 10**12)))  # type: ignore[misc]
        ratio = _stored_btrfs(driver) / before
    finally:
        driver.close()
    table.add("snapshot, btrfs driver", median(snapshots), None)
    table.add("fork, btrfs driver", median(forks), None)
    return {
        "snapshot_btrfs_ms": median(snapshots) * 1000,
        "fork_btrfs_ms": median(forks) * 1000,
        "forks20_bytes_ratio_btrfs": ratio,
    }
