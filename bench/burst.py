"""A hundred sandboxes started at once, compared with a hundred bubblewraps; and five hundred alive at the same time.

Both sides start all hundred before waiting for any. One failure fails the benchmark.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from bench import ground, peers
from bench.measure import Contender, Progress, Report, Table, median, paired_ratio, rounds
from carrel.providers import Handle, Launch

AT_ONCE = 100
ALIVE = 500
ROUNDS = 7
SETTLE_S = 0.1


async def run(progress: Progress) -> Report:
    """Measure."""
    peers.require()
    async with ground.sandboxes() as boxes:
        contenders: dict[str, Contender] = {name: _peer(command) for name, command in peers.ONE_SHOTS.items()}
        contenders["carrel"] = _carrel(boxes)
        samples = await rounds(contenders, ROUNDS, warm_up=1, progress=progress)
        many = await _many_alive(boxes)
    bwrap, ours = samples["bubblewrap"], samples["carrel"]
    table = Table(
        f"{AT_ONCE} at once, each runs /bin/true, {ROUNDS} rounds", ("", "median s", "worst s", "× bubblewrap")
    )
    for name, taken in samples.items():
        table.add(name, median(taken), max(taken), paired_ratio(taken, bwrap))
    alive = Table(f"{ALIVE} carrel sandboxes alive at once", ("", "seconds"))
    for name, seconds in many.items():
        alive.add(name, seconds)
    return Report(
        {
            "start100_s": median(ours),
            "start100_bwrap_s": median(bwrap),
            "start100_vs_bwrap": paired_ratio(ours, bwrap),
            "alive_at_once": ALIVE,
            "alive_start_s": many["started, first command run"],
            "alive_exec_s": many["a second command in each"],
            "alive_remove_s": many["removed"],
        },
        [table, alive],
    )


def _peer(command: Sequence[str]) -> Contender:
    async def turn() -> float:
        await asyncio.sleep(SETTLE_S)
        return peers.at_once(command, AT_ONCE)

    return turn


def _carrel(boxes: ground.Sandboxes) -> Contender:
    async def turn() -> float:
        launches = [boxes.workspace() for _ in range(AT_ONCE)]
        await asyncio.sleep(SETTLE_S)
        began = time.perf_counter()
        handles = await _start_all(boxes, launches)
        took = time.perf_counter() - began
        await asyncio.gather(*map(boxes.remove, handles))
        return took

    return turn


async def _start_all(boxes: ground.Sandboxes, launches: list[Launch]) -> list[Handle]:
    async def one(launch: Launch) -> Handle:
        handle = await boxes.start(launch)
        await ground.first_command(handle)
        return handle

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(launch)) for launch in launches]
    return [task.result() for task in tasks]


async def _many_alive(boxes: ground.Sandboxes) -> dict[str, float]:
    took: dict[str, float] = {}
    clock = time.perf_counter
    launches = [boxes.workspace() for _ in range(ALIVE)]
    began = clock()
    handles: list[Handle] = []
    for first in range(0, ALIVE, AT_ONCE):
        handles += await _start_all(boxes, launches[first : first + AT_ONCE])
    took["started, first command run"] = clock() - began
    began = clock()
    for handle in handles:  # each one must answer while all others are alive
        await ground.first_command(handle)
    took["a second command in each"] = clock() - began
    began = clock()
    await asyncio.gather(*map(boxes.remove, handles))
    took["removed"] = clock() - began
    return took
