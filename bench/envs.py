"""A ready Python environment attached to a running sandbox, through the SDK, until the response.

Each turn has a new sandbox, so that nothing of the attachment is cached; and once more in the same sandbox. The
packages come from the index that this host uses. A second sandbox must add neither disk space nor a download.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path

from bench import ground
from bench.measure import BenchFailed, Contender, Progress, Report, Table, median, percentile, rounds, timed
from carrel.client import Client
from carrel.models import EnvironmentInfo

ROUNDS = 60
PACKAGES = ["pandas"]


async def run(progress: Progress) -> Report:
    """Measure."""
    async with ground.server() as server:
        with Client(server.url, server.token, timeout=600) as client, client.sandbox("bench-first") as first:
            began = time.perf_counter()
            info = await asyncio.to_thread(first.envs.attach, PACKAGES)
            built = time.perf_counter() - began
            added, downloaded = _second(client, info, server.data)
            contenders: dict[str, Contender] = {
                "first time": _new(client),
                "again": timed(lambda: first.envs.attach(PACKAGES)),
            }
            samples = await rounds(contenders, ROUNDS, warm_up=2, progress=progress)
    table = Table(
        f"{' '.join(PACKAGES)}, ready, attached through the SDK, {ROUNDS} rounds", ("", "median ms", "p99 ms")
    )
    for name, taken in samples.items():
        table.add(name, median(taken) * 1e3, percentile(taken, 99) * 1e3)
    return Report(
        {
            "env_attach_ms": median(samples["first time"]) * 1e3,
            "env_attach_p99_ms": percentile(samples["first time"], 99) * 1e3,
            "env_attach_again_ms": median(samples["again"]) * 1e3,
            "env_build_s": built,
            "env_size_mb": info.size / 1e6,
            "env_second_sandbox_mb": added / 1e6,
            "env_second_sandbox_downloaded_mb": downloaded / 1e6,
        },
        [table],
    )


def _second(client: Client, info: EnvironmentInfo, data: Path) -> tuple[int, int]:
    """Measure the disk space and the downloads that a second sandbox with the same packages adds."""
    with client.sandbox() as box:
        box.commands.run("true")
        before, packages = _size(data), _size(data / "cache")
        path = box.envs.attach(PACKAGES).path
        if path != info.path:
            raise BenchFailed("the second sandbox has another environment")
        done = box.commands.run([f"{path}/bin/python", "-c", "import pandas"], timeout=120)
        if done.exit_code != 0:
            raise BenchFailed(f"pandas cannot be imported: {done.stderr[-500:]}")
        return _size(data) - before, _size(data / "cache") - packages


def _size(top: Path) -> int:
    total = 0
    for each in top.rglob("*"):
        try:
            total += each.lstat().st_blocks * 512
        except FileNotFoundError:
            continue  # a file of the server that was removed meanwhile
    return total


def _new(client: Client) -> Contender:
    count = itertools.count(1)

    async def turn() -> float:
        box = client.sandbox(f"bench-{next(count)}")
        try:
            began = time.perf_counter()
            box.envs.attach(PACKAGES)
            return time.perf_counter() - began
        finally:
            box.terminate(delete_files=True)

    return turn
