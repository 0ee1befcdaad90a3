"""Unpacking a compressed layer beside GNU `tar -xz` of the same file, in turns, each into a new directory.

The layer has the standard library of this Python, the time zones and the manuals: mostly small files. carrel's
time is that of the whole child process: start, decompression, the digest, the files. The hard links of a root file
system are made afterwards from the unpacked layer, and have a figure of their own.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from bench.measure import BenchFailed, Contender, Progress, Report, Table, median, paired_ratio, rounds, timed
from carrel.images.layer_reading import LayerLimits

ROUNDS = 7
LIMITS = LayerLimits(max_bytes=8 << 30, max_entries=1_000_000, max_ratio=1000)


async def run(progress: Progress) -> Report:
    """Measure."""
    place = Path(tempfile.mkdtemp(prefix="carrel-bench-images-"))
    try:
        blob, diff_id, entries, size = _layer(place)
        target = place / "target"
        unpacked = place / "unpacked"
        _child("unpack", unpacked, str(blob), diff_id, *LIMITS.words())
        contenders: dict[str, Contender] = {
            "carrel": _emptied(target, lambda: _child("unpack", target, str(blob), diff_id, *LIMITS.words())),
            "tar": _emptied(target, lambda: _tar(blob, target)),
            "root": _emptied(target, lambda: _child("assemble", target, str(unpacked))),
        }
        samples = await rounds(contenders, ROUNDS, warm_up=1, progress=progress)
    finally:
        shutil.rmtree(place)
    table = Table(f"a layer of {entries} entries, {size / 1e6:.0f} MB, {ROUNDS} rounds", ("", "median s"))
    for name, taken in samples.items():
        table.add(name, median(taken))
    both = [mine + root for mine, root in zip(samples["carrel"], samples["root"], strict=True)]
    return Report(
        {
            "image_unpack_vs_tar": paired_ratio(samples["carrel"], samples["tar"]),
            "image_unpack_and_root_vs_tar": paired_ratio(both, samples["tar"]),
            "image_unpack_s": median(samples["carrel"]),
            "image_root_s": median(samples["root"]),
        },
        [table],
    )


def _layer(place: Path) -> tuple[Path, str, int, int]:
    tar = place / "layer.tar"
    sources = [sysconfig.get_paths()["stdlib"], "/usr/share/zoneinfo", "/usr/share/man"]
    names = [os.path.realpath(each).lstrip("/") for each in sources if os.path.isdir(each)]
    # A file of the host may change meanwhile; the layer is whole all the same.
    subprocess.run(
        ["tar", "-C", "/", "-cf", str(tar), "--ignore-failed-read", *names], check=False, capture_output=True
    )
    data = tar.read_bytes()
    blob = place / "layer.tar.gz"
    blob.write_bytes(gzip.compress(data, 6))
    entries = len(subprocess.run(["tar", "-tf", str(tar)], check=True, capture_output=True).stdout.splitlines())
    tar.unlink()
    return blob, f"sha256:{hashlib.sha256(data).hexdigest()}", entries, len(data)


def _emptied(target: Path, work) -> Contender:  # type: ignore[no-untyped-def]
    measured = timed(work)

    async def turn() -> float:
        if target.exists():
            shutil.rmtree(target)
        return await measured()

    return turn


def _child(command: str, target: Path, *words: str) -> None:
    target.mkdir()
    argv = [sys.executable, "-m", "carrel.images.unpack", str(os.getpid()), command, str(target), *words]
    done = subprocess.run(argv, capture_output=True, check=False)
    if done.returncode != 0:
        raise BenchFailed(f"the layer was not unpacked: {done.stdout[-300:].decode()} {done.stderr[-300:].decode()}")


def _tar(blob: Path, target: Path) -> None:
    target.mkdir()
    subprocess.run(["tar", "-xzf", str(blob), "-C", str(target)], check=True)
