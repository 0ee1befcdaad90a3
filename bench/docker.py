"""Containers beside `docker run`, and `podman run` where podman is installed: from nothing to the end of the first
command, cold and from a slot; a command in a running one beside the namespace provider's; the memory of an idle slot.

All use one daemon, made for this run, and one image, in turns. The peers have no limits and no supervisor: `run --rm`
of `/bin/true`, without a network.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tests.support import dockerd

from bench import ground
from bench.measure import BenchFailed, Contender, Figures, Progress, Report, Table, median, percentile, ratio, rounds
from bench.wire import Wire
from carrel.providers.docker import DockerProvider

COLD_ROUNDS, COMMAND_ROUNDS, IDLE = 12, 100, 4
PODMAN = ("--cgroup-manager=cgroupfs", "--events-backend=file", "--runtime=runc")
"""Podman without systemd, and with the runtime that Docker has too."""
PODMAN_LIMITS = ("--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024")
"""Its own limits are above those of a root that may raise none."""


async def run(progress: Progress) -> Report:
    """Measure."""
    if (missing := dockerd.missing()) is not None:
        raise BenchFailed(f"no Docker daemon can be started: {missing}")
    daemon = await asyncio.to_thread(dockerd.DockerDaemon)
    try:
        async with ground.scratch() as place, _sandboxes(daemon.socket, place) as boxes, ground.sandboxes() as others:
            return await _measure(
                Docker(daemon.socket, boxes, await _image(daemon.socket, boxes)), others, place, progress
            )
    finally:
        await asyncio.to_thread(daemon.close)


@dataclass
class Docker:
    """The daemon of this run, its sandboxes, and the image that they have."""

    socket: str
    boxes: ground.Sandboxes
    image: str
    slots: int = 0


async def _measure(docker: Docker, others: ground.Sandboxes, place: Path, progress: Progress) -> Report:
    peer = ("docker", "--host", f"unix://{docker.socket}")
    starts: dict[str, Contender] = {"docker run": _run(*peer, image=docker.image)}
    if shutil.which("podman") is not None:
        podman = ("podman", "--root", str(place / "podman"), "--runroot", str(place / "podman-run"), *PODMAN)
        await asyncio.to_thread(_give_to_podman, peer, podman, docker.image)
        starts["podman run"] = _run(*podman, image=docker.image, limits=PODMAN_LIMITS)
    starts |= {"carrel, cold": _cold(docker), "carrel, from a slot": _from_slot(docker)}
    try:
        taken = await rounds(starts, COLD_ROUNDS, warm_up=2, progress=progress)
    finally:
        if "podman run" in starts:
            subprocess.run([*podman, "system", "reset", "--force"], check=False, stdout=subprocess.DEVNULL)
    idle = [await _slot(docker) for _ in range(IDLE)]
    memory = await ground.memory_of(docker.boxes.provider, idle)
    for handle in idle:
        await docker.boxes.provider.remove(handle)
    running = {"namespace": await others.start(), "carrel": await docker.boxes.start()}
    wires = {name: Wire(ground.reach(handle)) for name, handle in running.items()}
    try:
        asked: dict[str, Contender] = {name: _command(wire) for name, wire in wires.items()}
        commands = await rounds(asked, COMMAND_ROUNDS, warm_up=5, progress=progress)
    finally:
        for wire in wires.values():
            wire.close()
    table = Table(f"{COLD_ROUNDS} starts, {COMMAND_ROUNDS} commands", ("", "median ms", "p95 ms", "× peer"))
    for title, samples, theirs in (("start", taken, "docker run"), ("command", commands, "namespace")):
        for name, values in samples.items():
            row = (median(values) * 1e3, percentile(values, 95) * 1e3, ratio(values, samples[theirs]))
            table.add(f"{title}, {name}", *row)
    table.add("memory of an idle slot, MB", median(memory) / 1e6, max(memory) / 1e6, None)
    figures: Figures = {
        "docker_cold_ms": median(taken["carrel, cold"]) * 1e3,
        "docker_cold_vs_docker_run": ratio(taken["carrel, cold"], taken["docker run"]),
        "docker_slot_ms": median(taken["carrel, from a slot"]) * 1e3,
        "docker_exec_ms": median(commands["carrel"]) * 1e3,
        "docker_exec_vs_namespace": ratio(commands["carrel"], commands["namespace"]),
        "docker_slot_mb": median(memory) / 1e6,
    }
    if "podman run" in taken:
        figures["docker_cold_vs_podman_run"] = ratio(taken["carrel, cold"], taken["podman run"])
    return Report(figures, [table])


@asynccontextmanager
async def _sandboxes(socket: str, place: Path) -> AsyncIterator[ground.Sandboxes]:
    for name in ("run", "ws"):
        (place / name).mkdir()
    provider = DockerProvider(str(place / "run"), str(place / "bundles"), socket_path=socket)
    made = ground.Sandboxes(provider, place / "ws", place / "images")
    try:
        yield made
    finally:
        try:
            await made.remove_all()
        finally:
            await provider.close()


async def _image(socket: str, boxes: ground.Sandboxes) -> str:
    """Return the image of a sandbox with the host's programs, once one has started."""
    await boxes.remove(await boxes.start())
    words = ["docker", "--host", f"unix://{socket}", "images", "--format", "{{.Repository}}:{{.Tag}}"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()[0]


def _give_to_podman(docker: tuple[str, ...], podman: tuple[str, ...], image: str) -> None:
    with subprocess.Popen([*docker, "save", image], stdout=subprocess.PIPE) as saving:
        subprocess.run([*podman, "load", "--quiet"], stdin=saving.stdout, stdout=subprocess.DEVNULL, check=True)


def _run(*client: str, image: str, limits: tuple[str, ...] = ()) -> Contender:
    mine = ("--rm", "--network", "none", "--volume", "/usr:/usr:ro", *limits)

    async def turn() -> float:
        words = (*client, "run", *mine, image, "/bin/true")
        began = time.perf_counter()
        process = await asyncio.create_subprocess_exec(*words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        if await process.wait() != 0:
            raise BenchFailed(f"{' '.join(words)} failed")
        return time.perf_counter() - began

    return turn


def _cold(docker: Docker) -> Contender:
    async def turn() -> float:
        launch = docker.boxes.workspace()
        began = time.perf_counter()
        handle = await docker.boxes.start(launch)
        await ground.first_command(handle)
        took = time.perf_counter() - began
        await docker.boxes.remove(handle)
        return took

    return turn


def _from_slot(docker: Docker) -> Contender:
    async def turn() -> float:
        slot = await _slot(docker)
        launch = docker.boxes.workspace()
        began = time.perf_counter()
        handle = await docker.boxes.provider.claim(slot, launch)
        await ground.first_command(handle)
        took = time.perf_counter() - began
        await docker.boxes.provider.remove(handle)
        return took

    return turn


async def _slot(docker: Docker) -> ground.Handle:
    """Start a slot. This is not measured."""
    docker.slots += 1
    wanted = docker.boxes.provider.slot_for(docker.boxes.workspace())
    if wanted is None:
        raise BenchFailed("a container has no slot")
    slot = await docker.boxes.provider.start_slot(replace(wanted, id=f"slot-{docker.slots}-{os.getpid()}"))
    await asyncio.sleep(0.2)  # until the daemon has done what it does after a start
    return slot


def _command(wire: Wire) -> Contender:
    async def turn() -> float:
        began = time.perf_counter()
        wire.call(ground.RUN_BIN_TRUE)
        return time.perf_counter() - began

    return turn
