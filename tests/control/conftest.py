from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest

from carrel.config import Settings, load
from carrel.control.plane import ControlPlane


@pytest.fixture(autouse=True)
def _forked(forked: None) -> None: ...


@pytest.fixture
def data_dir() -> Iterator[str]:
    """A short path: a Unix socket address holds 107 bytes."""
    path = tempfile.mkdtemp(prefix="carrel-t-")
    yield path
    shutil.rmtree(path)


@pytest.fixture
def settings(data_dir: str) -> Settings:
    flags = {"data_dir": data_dir, "sandbox.allow_process": True, "max_sandboxes": 6, "volumes": "directory"}
    return load(flags, environ={})


@pytest.fixture
async def plane(settings: Settings) -> AsyncIterator[ControlPlane]:
    plane = await ControlPlane.open(settings)
    if plane.providers["namespace"].missing():
        changed = settings.sandbox.model_copy(update={"provider": "process"})
        await plane.close()
        plane = await ControlPlane.open(settings.model_copy(update={"sandbox": changed}))
    yield plane
    await plane.close()


@pytest.fixture
def node_settings(settings: Settings) -> list[Settings]:
    """Two servers that share the database and the archive, and nothing else."""
    shared = {"database": f"sqlite:///{settings.data_dir}/shared.db", "archive": f"{settings.data_dir}/archive"}
    found = []
    for name in ("a", "b"):
        flags = {"data_dir": f"{settings.data_dir}/{name}", "node": name, "volumes": "directory", **shared}
        flags["lease_s"] = 600.0  # renewed when a test says so, however long it takes
        found.append(load(flags, environ={}))
    return found


@pytest.fixture
async def nodes(node_settings: list[Settings]) -> AsyncIterator[list[ControlPlane]]:
    async with AsyncExitStack() as stack:
        planes = []
        for each in node_settings:
            planes.append(await ControlPlane.open(each))
            planes[-1].sessions._leases._connected -= 7200  # as if it had run for long
            stack.push_async_callback(planes[-1].close)
        yield planes
