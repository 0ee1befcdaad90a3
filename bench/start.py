"""From the request for a sandbox to the end of its first command, compared with single runs of the peers.

Measured: `provider.start()` and `/bin/true` over the supervisor's socket, with memory and process limits; and the same
with 20 masks, 18 programs that cannot run and two paths that cannot be read. The peers only run `/bin/true`.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace

from bench import ground, peers
from bench.measure import BenchFailed, Contender, Progress, Report, Table, median, percentile, ratio, rounds
from bench.wire import Wire
from carrel.providers import Masks

ROUNDS = 150
PROGRAMS = tuple(
    "base32 base64 cksum comm csplit cut expand factor fmt fold join nl numfmt paste pr ptx shred split".split()  # noqa: SIM905
)
SETTLE_S = 0.008
"""Pause between turns, so that cleanup of the last turn and the making of spares are not measured."""


async def run(progress: Progress) -> Report:
    """Measure."""
    peers.require()
    async with ground.sandboxes() as warm, ground.sandboxes(spares=False) as cold:
        contenders: dict[str, Contender] = {name: _peer(command) for name, command in peers.ONE_SHOTS.items()}
        contenders["carrel"] = _carrel(warm)
        contenders["carrel, no spare"] = _carrel(cold)
        contenders["carrel, 20 masks"] = _carrel(warm, _masks())
        samples = await rounds(contenders, ROUNDS, warm_up=3, progress=progress)
    bwrap = samples["bubblewrap"]
    table = Table(f"start to first command finished, {ROUNDS} rounds", ("", "median ms", "p99 ms", "× bubblewrap"))
    for name, taken in samples.items():
        table.add(name, median(taken) * 1e3, percentile(taken, 99) * 1e3, ratio(taken, bwrap))
    ours, unspared, masked = samples["carrel"], samples["carrel, no spare"], samples["carrel, 20 masks"]
    return Report(
        {
            "start_ms": median(ours) * 1e3,
            "start_p99_ms": percentile(ours, 99) * 1e3,
            "start_vs_bwrap": ratio(ours, bwrap),
            "start_cold_ms": median(unspared) * 1e3,
            "start_cold_vs_bwrap": ratio(unspared, bwrap),
            "start_masked_ms": median(masked) * 1e3,
            "start_masked_ms_added": (median(masked) - median(ours)) * 1e3,
            "start_bwrap_ms": median(bwrap) * 1e3,
            "start_unshare_ms": median(samples["unshare, 7 namespaces"]) * 1e3,
            "start_subprocess_ms": median(samples["plain subprocess"]) * 1e3,
        },
        [table],
    )


def _peer(command: Sequence[str]) -> Contender:
    async def turn() -> float:
        await asyncio.sleep(SETTLE_S)
        return peers.once(command)

    return turn


def _masks() -> Masks:
    """Choose programs that exist: a mask of a missing program costs nothing."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        raise BenchFailed(f"'{missing[0]}' is not installed, so that it cannot be masked")
    return Masks(programs=PROGRAMS, hidden=("/etc/hosts", "/usr/share"))


def _carrel(boxes: ground.Sandboxes, masks: Masks | None = None) -> Contender:
    async def turn() -> float:
        launch = replace(boxes.workspace(), masks=masks)
        await asyncio.sleep(SETTLE_S)
        began = time.perf_counter()
        handle = await boxes.start(launch)
        wire = Wire(ground.reach(handle))
        try:
            wire.call(ground.RUN_BIN_TRUE)
            took = time.perf_counter() - began
        finally:
            wire.close()
        await boxes.remove(handle)
        return took

    return turn
