"""Many clients that claim slots while slots are killed at random: each context has its own files and no others."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

from tests.support.calls import ADMIN
from tests.support.sandboxes import until

from carrel.control.plane import ControlPlane
from carrel.models import CommandRequest, SandboxRequest, State
from carrel.providers import foreign_processes
from carrel.providers.base import Handle, Launch, Provider

CLIENTS = 16
KILLED = 0.4
"""The share of slots that are killed, if nobody claims them before."""
FILES = "ls -p | grep -v /; "
"""The files in a workspace, without the folders that every new one has."""


async def start(plane: ControlPlane, context: str | None, **more: object) -> str:
    """Start a sandbox of a context, and return its session."""
    info, _ = await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id=context, **more))
    assert info.state is State.RUNNING
    return info.id


async def said(plane: ControlPlane, name: str, command: str) -> str:
    """What a command says in the sandbox of a context."""
    return (await plane.operations.run_command(ADMIN, name, CommandRequest(command=command))).stdout


def ready(plane: ControlPlane) -> list[Handle]:
    """The slots that wait for an owner."""
    return [slot.handle for pool in plane._slots.pools for slot in pool.in_state("ready") if slot.handle is not None]


async def many_claims(plane: ControlPlane, provider: Provider, claims: int, seed: int) -> tuple[int, int]:
    """Let 16 clients start so many contexts, one after the other each, while slots are killed; the server is idle
    before, and its sandboxes are ended afterwards. Return how many slots were killed and claimed.
    """
    random, finished = Random(seed), asyncio.Event()
    numbers, claimed = iter(range(claims)), _claimed(provider)
    shot = 0

    async def client() -> None:
        for number in numbers:
            name = f"c{number}"
            await start(plane, name, env={"ME": name})
            assert await said(plane, name, FILES + "echo $ME > $ME") == "", "a new context has no files"
            if number % 4 == 0:
                await plane.sessions.stop(name)
                await start(plane, name)
            assert await said(plane, name, FILES + "cat c*") == f"{name}\n{name}\n"
            if number % 8 == 7:
                with suppress(asyncio.CancelledError):
                    cut = asyncio.ensure_future(start(plane, f"x{number}"))
                    await asyncio.sleep(random.uniform(0, 0.05))
                    cut.cancel()
                    await cut
            await plane.sessions.stop(name)

    async def shoot() -> None:
        nonlocal shot
        doomed: dict[str, bool] = {}
        while not finished.is_set():
            await asyncio.sleep(random.uniform(0, 0.1))
            for handle in ready(plane):
                pid = int(handle["pid"] or 0)
                if (
                    doomed.setdefault(str(handle["id"]), random.random() < KILLED)
                    and random.random() < 0.5
                    and foreign_processes.runs(pid, int(handle["start_time"] or 0))
                ):
                    os.kill(pid, signal.SIGKILL)
                    shot += 1

    await start(plane, "warm")
    (pool,) = await until(lambda: plane._slots.pools)
    await until(lambda: len(ready(plane)) >= pool.counts.size, timeout=120)
    shooter = asyncio.ensure_future(shoot())
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(client())
        finished.set()
        await shooter
    finally:
        finished.set()
        await asyncio.gather(shooter, return_exceptions=True)
    assert shot > 0 and pool.claimed > 0, (shot, pool.claimed)
    assert len(claimed) == len(set(claimed)), "a slot was claimed twice"
    for number in range(claims):
        files = Path(plane.driver.directory, f"ctx-c{number}")
        assert (files / f"c{number}").read_text() == f"c{number}\n"
    await plane.sessions.shutdown()
    await plane._slots.close()
    assert await provider.running() == []
    return shot, pool.claimed


def _claimed(provider: Provider) -> list[str]:
    """The ids of the slots that are claimed from now on."""
    claim: Callable[..., object] = provider.claim
    ids: list[str] = []

    async def noted(slot: Handle, launch: Launch) -> Handle:
        if str(slot["id"]).startswith("slot-"):  # a cold start may be a slot too, which is claimed at once
            ids.append(str(slot["id"]))
        return await claim(slot, launch)  # type: ignore[misc, no-any-return]

    provider.claim = noted  # type: ignore[method-assign]
    return ids
