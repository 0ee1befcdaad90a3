"""Environments on a disk that is really full, while calls use some of them: what is in use stays, whatever else goes."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.support.calls import ADMIN
from tests.support.environments_ground import attach, context, stocked
from tests.support.indexes import IndexServer, wheel
from tests.support.volumes import unmount

from carrel.config import Settings
from carrel.control.plane import ControlPlane
from carrel.errors import CarrelError, PlatformError
from carrel.models import CellRequest, EnvironmentAttach, PythonRequest, TerminateRequest

PAYLOAD = 3 << 20
CHURN = 6


@pytest.fixture
def disk(settings: Settings) -> Iterator[Path]:
    """A file system of 28 MB for the environments alone."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    place, image = Path(settings.data_dir, "envs"), f"{settings.data_dir}/image"
    place.mkdir()
    with open(image, "wb") as file:
        file.truncate(28 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, str(place)], check=True)
    yield place
    unmount(str(place))


@pytest.fixture
async def index(disk: Path) -> AsyncIterator[IndexServer]:
    async with stocked() as server:
        for number in range(CHURN + 2):
            server.add(wheel(f"heavy{number}", payload=os.urandom(PAYLOAD)))
        yield server


def free(disk: Path) -> float:
    facts = os.statvfs(disk)
    return facts.f_bavail / facts.f_blocks


async def used(plane: ControlPlane, name: str, env: str, number: int) -> None:
    """A call that reads all of its package, and a cell."""
    code = (
        f"import heavy{number}, os; print(len(open(os.path.dirname(heavy{number}.__file__) + '/payload', 'rb').read()))"
    )
    result = await plane.python.run(ADMIN, name, PythonRequest(code=code, env=env))
    assert result.stdout == f"{PAYLOAD}\n", result.stderr
    cell = await plane.code_contexts.run_cell(ADMIN, name, "a", CellRequest(code=code, env=env))
    assert cell.stdout == f"{PAYLOAD}\n", cell.error


async def test_nothing_in_use_disappears(disk: Path, index: IndexServer, settings: Settings) -> None:
    kept = settings.envs.model_copy(update={"keep_free_percent": 30.0})
    plane = await ControlPlane.open(settings.model_copy(update={"envs": kept, "max_sandboxes": 12}))
    try:
        plane.environments.grace_s = 0
        held = {}
        for number, name in enumerate(("one", "two")):
            await context(plane, index, name)
            held[name] = (await attach(plane, name, f"heavy{number}")).name, number
        over = False

        async def use(name: str) -> int:
            calls = 0
            while not over:
                await used(plane, name, *held[name])
                calls += 1
                await asyncio.sleep(0.05)  # leaves the processor to what fills the disk
            return calls

        async def churn() -> int:
            """Fill the disk with what nobody holds for long."""
            removed = 0
            for number in range(2, CHURN + 2):
                passing = await context(plane, index, f"passing{number}")
                await attach(plane, passing, f"heavy{number}")
                await plane.operations.terminate(ADMIN, passing, TerminateRequest())
                removed += await plane.environments.evict()
            return removed

        using = [asyncio.create_task(use(name)) for name in held]
        try:
            assert await churn() >= 2, "the disk was never full"
        finally:
            over = True
            calls = await asyncio.gather(*using)
        assert min(calls) > 2
        left = set(os.listdir(disk / "shelf"))
        assert {name for name, _ in held.values()} <= left and len(left) < CHURN + 2

        in_use = {name for name, _ in held.values()}
        for idle in left - in_use:
            await plane.environments.remove(ADMIN, idle)
        hog = disk / "hog"
        with hog.open("wb") as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        assert free(disk) < 0.01
        await context(plane, index, "late")
        with pytest.raises(PlatformError, match="No space left"):
            await attach(plane, "late", "shelf", "nail")
        assert os.listdir(disk / "drafts") == [], "what could not be built leaves nothing"
        await plane.environments.evict()
        for name, (env, number) in held.items():
            await used(plane, name, env, number)
            assert (await plane.envs.attach(ADMIN, name, EnvironmentAttach(env=env))).in_use
        hog.unlink()
        assert (await attach(plane, "late", "shelf", "nail")).packages
        assert {name for name, _ in held.values()} <= set(os.listdir(disk / "shelf"))
    finally:
        try:
            await plane.close()
        except CarrelError:
            pytest.fail("the server could not be closed")
