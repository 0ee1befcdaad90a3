from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator

import pytest

from carrel.config import Settings, load
from carrel.control.plane import ControlPlane


@pytest.fixture
def data_dir() -> Iterator[str]:
    """A short path: a Unix socket address holds 107 bytes."""
    path = tempfile.mkdtemp(prefix="carrel-t-")
    yield path
    shutil.rmtree(path)


@pytest.fixture
def settings(data_dir: str) -> Settings:
    return load({"data_dir": data_dir, "sandbox.allow_process": True, "max_sandboxes": 6}, environ={})


@pytest.fixture
async def plane(settings: Settings) -> AsyncIterator[ControlPlane]:
    plane = await ControlPlane.open(settings)
    if plane.providers["namespace"].missing():
        changed = settings.sandbox.model_copy(update={"provider": "process"})
        await plane.close()
        plane = await ControlPlane.open(settings.model_copy(update={"sandbox": changed}))
    yield plane
    await plane.close()
