"""gVisor sandboxes beside `runsc` itself: from nothing to the end of the first command, from a slot that has started
before, and a command in a running one.

Both use the same `runsc`, in turns. The peer has no supervisor, no limits and a root that is there already: `runsc run`
and `runsc exec` of `/bin/true`.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from bench import ground
from bench.measure import BenchFailed, Contender, Figures, Progress, Report, Table, median, percentile, ratio, rounds
from bench.wire import Wire
from carrel.providers.base import Handle, Launch
from carrel.providers.gvisor.options import GvisorOptions
from carrel.providers.gvisor.provider import GvisorProvider

COLD_ROUNDS, COMMAND_ROUNDS, IDLE = 12, 60, 4
BUILD = Path(__file__).parent.parent / "scripts" / "build-runsc"
FLAGS = ("--ignore-cgroups", "--network=none", "--platform=systrap")


async def run(progress: Progress) -> Report:
    """Measure."""
    runsc = await asyncio.to_thread(_runsc)
    async with _sandboxes(runsc) as boxes, ground.scratch() as place, _peer(place):
        cold: dict[str, Contender] = {
            "runsc run": _peer_run(runsc, place),
            "carrel": _cold(boxes),
            "from a slot": _slot(boxes),
        }
        starts = await rounds(cold, COLD_ROUNDS, warm_up=2, progress=progress)
        idle = [await boxes.start() for _ in range(IDLE)]
        for handle in idle:
            await ground.first_command(handle)
        memory = await ground.memory_of(boxes.provider, idle)
        slots = [await _start_slot(boxes, boxes.workspace()) for _ in range(IDLE)]
        waiting = await ground.memory_of(boxes.provider, slots)
        for slot in slots:
            await boxes.remove(slot)
        wire = Wire(ground.reach(idle[0]))
        try:
            running: dict[str, Contender] = {"runsc exec": _peer_exec(runsc, idle[0]), "carrel": _command(wire)}
            commands = await rounds(running, COMMAND_ROUNDS, warm_up=3, progress=progress)
        finally:
            wire.close()
    table = Table(f"{COLD_ROUNDS} starts, {COMMAND_ROUNDS} commands", ("", "median ms", "p95 ms", "× runsc"))
    for title, samples, peer in (("start", starts, "runsc run"), ("command", commands, "runsc exec")):
        for name, taken in samples.items():
            values = (median(taken) * 1e3, percentile(taken, 95) * 1e3, ratio(taken, samples[peer]))
            table.add(f"{title}, {name}", *values)
    table.add("memory of an idle one, MB", median(memory) / 1e6, max(memory) / 1e6, None)
    table.add("memory of a slot, MB", median(waiting) / 1e6, max(waiting) / 1e6, None)
    figures: Figures = {
        "gvisor_cold_ms": median(starts["carrel"]) * 1e3,
        "gvisor_cold_vs_runsc": ratio(starts["carrel"], starts["runsc run"]),
        "gvisor_slot_ms": median(starts["from a slot"]) * 1e3,
        "gvisor_slot_mb": median(waiting) / 1e6,
        "gvisor_exec_ms": median(commands["carrel"]) * 1e3,
        "gvisor_exec_vs_runsc_exec": ratio(commands["carrel"], commands["runsc exec"]),
        "gvisor_idle_mb": median(memory) / 1e6,
    }
    return Report(figures, [table])


def _runsc() -> str:
    """Return the path of the pinned `runsc`; it is built if it is not there."""
    built = subprocess.run([BUILD], stdout=subprocess.PIPE, text=True, check=False)
    if built.returncode != 0:
        raise BenchFailed("runsc cannot be built here")
    return built.stdout.strip()


@asynccontextmanager
async def _sandboxes(runsc: str) -> AsyncIterator[ground.Sandboxes]:
    async with ground.scratch() as place:
        for name in ("run", "ws"):
            (place / name).mkdir()
        provider = GvisorProvider(str(place / "run"), options=GvisorOptions(runsc), bundles=str(place / "bundles"))
        if (missing := provider.missing()) is not None:
            raise BenchFailed(f"gVisor cannot be used here: {missing}")
        made = ground.Sandboxes(provider, place / "ws", place / "images")
        try:
            await provider.warm()
            yield made
        finally:
            try:
                await made.remove_all()
            finally:
                await provider.close()


@asynccontextmanager
async def _peer(place: Path) -> AsyncIterator[None]:
    """Write what `runsc run` needs, and remove the mount that it leaves in its state."""
    await asyncio.to_thread(_write_peer, place)
    try:
        yield
    finally:
        subprocess.run(["umount", "--quiet", f"{place}/state/null-netns"], check=False)


def _write_peer(place: Path) -> None:
    config = {
        "ociVersion": "1.0.2",
        "process": {"user": {"uid": 0, "gid": 0}, "args": ["/bin/true"], "cwd": "/", "noNewPrivileges": True},
        "root": {"path": "/", "readonly": True},
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "mount", "network", "ipc", "uts")]},
    }
    (place / "config.json").write_text(json.dumps(config))


async def _timed(*command: str) -> float:
    began = time.perf_counter()
    # Pipes: `runsc` gives its standard files to nobody, and /dev/null belongs to the host.
    process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    await process.communicate()
    if process.returncode != 0:
        raise BenchFailed(f"{' '.join(command)} failed")
    return time.perf_counter() - began


def _peer_run(runsc: str, place: Path) -> Contender:
    async def turn() -> float:
        name = f"peer-{os.urandom(4).hex()}"
        return await _timed(runsc, f"--root={place}/state", *FLAGS, "run", f"--bundle={place}", name)

    return turn


def _peer_exec(runsc: str, handle: Handle) -> Contender:
    state = Path(str(handle["socket"])).parent / "state"

    async def turn() -> float:
        return await _timed(runsc, f"--root={state}", "exec", "--user=1000:1000", str(handle["id"]), "/bin/true")

    return turn


def _cold(boxes: ground.Sandboxes) -> Contender:
    async def turn() -> float:
        launch = boxes.workspace()
        began = time.perf_counter()
        handle = await boxes.start(launch)
        await ground.first_command(handle)
        took = time.perf_counter() - began
        await boxes.remove(handle)
        await asyncio.sleep(0.2)  # until the process for the next one is ready
        return took

    return turn


async def _start_slot(boxes: ground.Sandboxes, launch: Launch) -> Handle:
    slot = boxes.provider.slot_for(launch)
    if slot is None:
        raise BenchFailed("this sandbox cannot have a slot")
    return await boxes.provider.start_slot(replace(slot, id=launch.id))


def _slot(boxes: ground.Sandboxes) -> Contender:
    """Claim a slot, which has started before, and run the first command in it."""

    async def turn() -> float:
        launch = boxes.workspace()
        slot = await _start_slot(boxes, launch)
        await asyncio.sleep(0.2)
        began = time.perf_counter()
        handle = await boxes.provider.claim(slot, launch)
        await ground.first_command(handle)
        took = time.perf_counter() - began
        await boxes.remove(handle)
        return took

    return turn


def _command(wire: Wire) -> Contender:
    async def turn() -> float:
        began = time.perf_counter()
        wire.call(ground.RUN_BIN_TRUE)
        return time.perf_counter() - began

    return turn
