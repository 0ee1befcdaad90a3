"""Real gVisor sandboxes: how a start can fail, and how a sandbox can end. What it promises is in the conformance suite."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.gvisor import find_runsc, usable
from tests.support.sandboxes import until

from carrel.errors import PlatformError, Unsupported
from carrel.models import Network
from carrel.providers import Masks, groups
from carrel.providers.base import Launch, RootImage
from carrel.providers.gvisor.options import GvisorOptions
from carrel.providers.gvisor.provider import GvisorProvider
from carrel.testing import Harness, workspaces_in


@pytest.fixture
async def place() -> AsyncIterator[Path]:
    """A short path: those of sockets end at 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="g"))
    for name in ("run", "ws"):
        (path / name).mkdir()
    yield path
    shutil.rmtree(path)


@pytest.fixture
async def harness(place: Path, bundles: Path) -> AsyncIterator[Harness]:
    harness = Harness(lambda: usable(str(bundles), str(place / "run")), workspaces_in(str(place / "ws")))
    yield harness
    await harness.close()
    assert os.listdir(place / "run") == []


def processes(id: str) -> list[int]:
    return [pid for group, _ in groups.find(id) for pid in groups.processes(group)]


async def test_a_sandbox_takes_no_device_of_the_host(harness: Harness) -> None:
    """`runsc` gives its standard files to the user of the sandbox."""
    before = os.stat(os.devnull)
    async with harness.sandbox():
        after = os.stat(os.devnull)
    assert (before.st_uid, after.st_uid, after.st_gid) == (0, 0, 0) and after.st_mode == before.st_mode


async def test_a_killed_sandbox_is_noticed_and_nothing_of_it_is_left(harness: Harness) -> None:
    for name in ("runsc-sandbox", "runsc-gofer"):
        async with harness.sandbox(memory_mb=256, cpus=0.5) as box:
            id = str(box.handle["id"])
            limits = [path.read_text() for group, _ in groups.find(id) for path in Path(group).glob("cpu.*")]
            assert any(each in {"50000\n", "50000 100000\n"} for each in limits)
            names = {Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(): pid for pid in processes(id)}
            assert {"runsc-sandbox", "runsc-gofer"} <= names.keys()
            used = (await harness.provider.resources([box.handle]))[id]
            assert 10 << 20 < (used.memory_bytes or 0) < 384 << 20 and (used.cpu_s or 0) > 0
            os.kill(names[name], 9)
            await until(lambda: asyncio.ensure_future(_ended(harness, box.handle)), what="the end of the sandbox")
            later = harness.make_provider()
            assert id in await later.running()
            await later.remove({"provider": "gvisor", "id": id, "socket": ""})  # as after a restart, without a handle
            assert processes(id) == [] and list(groups.find(id)) == []
            await later.close()
    assert await harness.provider.running() == []


async def _ended(harness: Harness, handle: dict[str, object]) -> bool:
    return not await harness.provider.alive(handle)  # type: ignore[arg-type]


async def test_a_start_that_fails_or_is_given_up_leaves_nothing(
    harness: Harness, place: Path, bundles: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "runsc"
    broken.write_text(
        "#!/bin/sh\ncase $1 in --version) echo runsc version 1;; *) echo no kernel today >&2; exit 3;; esac\n"
    )
    broken.chmod(0o755)
    provider = GvisorProvider(str(place / "run"), options=GvisorOptions(str(broken)), bundles=str(bundles))
    try:
        with pytest.raises(PlatformError, match="runsc failed: no kernel today"):
            await provider.start(harness.launch())
    finally:
        await provider.close()
    hidden = Masks(hidden=("/workspace/" + "*/" * 3 + "x",), readonly=("/workspace/a/**",))
    launch = harness.launch(masks=hidden)
    starting = asyncio.create_task(harness.provider.start(launch))
    await until(lambda: processes(launch.id), what="a process of the sandbox")
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert await harness.provider.running() == [] and processes(launch.id) == []


async def test_refused_before_anything_is_made(place: Path) -> None:
    options = GvisorOptions(find_runsc() or "/bin/true")
    provider = GvisorProvider(str(place / "run"), options=options, bundles="/none", images=str(place))
    for terms, words in (
        ({"network": Network.HOST}, "network_host"),
        ({"image": RootImage("/i", (0, 0), writable=True)}, "cannot be changed"),
        ({"masks": Masks(hidden=("/proc/version",))}, "which makes it itself"),
    ):
        with pytest.raises(Unsupported, match=words):
            await provider.start(Launch(**{"id": "x", "workspace": "/w", "network": Network.NONE, **terms}))
    with pytest.raises(PlatformError, match="cannot be the id"):
        await provider.remove({"id": "../x"})
    assert os.listdir(place / "run") == []
