"""From the request to resume a context to the end of its first command, compared with a new context.

Measured through the control plane, with the default volumes and archive of a server: a new context, and one with a
small workspace that was stopped before.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bench.measure import Contender, Progress, Report, Table, median, percentile, ratio, rounds
from carrel.config import load
from carrel.control.operations.caller import Caller
from carrel.control.plane import ControlPlane
from carrel.identity import ROOT
from carrel.models import CommandRequest, SandboxRequest

ROUNDS = 60
FILES = 50
ADMIN = Caller(ROOT)
TRUE = CommandRequest(command=["/bin/true"])


async def run(progress: Progress) -> Report:
    """Measure."""
    async with _plane() as plane:
        await _prepare(plane)
        contenders: dict[str, Contender] = {"fresh": _fresh(plane), "resumed": _resumed(plane)}
        samples = await rounds(contenders, ROUNDS, warm_up=3, progress=progress)
        driver = plane.driver.name
    table = Table(f"to first command finished, {driver} volumes, {ROUNDS} rounds", ("", "median ms", "p99 ms"))
    for name, taken in samples.items():
        table.add(name, median(taken) * 1e3, percentile(taken, 99) * 1e3)
    return Report(
        {
            "resume_ms": median(samples["resumed"]) * 1e3,
            "fresh_ms": median(samples["fresh"]) * 1e3,
            "resume_vs_start": ratio(samples["resumed"], samples["fresh"]),
        },
        [table],
    )


@asynccontextmanager
async def _plane() -> AsyncIterator[ControlPlane]:
    with tempfile.TemporaryDirectory(prefix="carrel-b-") as data_dir:
        plane = await ControlPlane.open(load({"data_dir": data_dir}, environ={}))
        try:
            yield plane
        finally:
            await plane.close()


async def _prepare(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="kept"))
    for number in range(FILES):
        await plane.operations.write_file(ADMIN, "kept", f"data/{number}", os.urandom(4096))


def _fresh(plane: ControlPlane) -> Contender:
    numbers = itertools.count()

    async def turn() -> float:
        context = f"fresh-{next(numbers)}"
        began = time.perf_counter()
        await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id=context))
        await plane.operations.run_command(ADMIN, context, TRUE)
        taken = time.perf_counter() - began
        await plane.sessions.terminate(ADMIN, context, delete_workspace=True)
        return taken

    return turn


def _resumed(plane: ControlPlane) -> Contender:
    async def turn() -> float:
        await plane.sessions.stop("kept")
        began = time.perf_counter()
        await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="kept"))
        await plane.operations.run_command(ADMIN, "kept", TRUE)
        return time.perf_counter() - began

    return turn
