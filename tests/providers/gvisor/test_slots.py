"""Slots of gVisor: what their owner gets, what an agent can do there, and what is left when the server is killed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.gvisor import usable
from tests.support.sandboxes import until

from carrel.errors import PlatformError
from carrel.isolation import late_masks, late_mounts
from carrel.models import Network
from carrel.providers import Masks, groups
from carrel.providers.base import Handle, Launch
from carrel.providers.control_directory import WaitingSupervisor
from carrel.providers.gvisor import provider
from carrel.providers.gvisor.provider import GvisorProvider
from carrel.providers.stagers import Stagers
from carrel.testing.harness import SANDBOX_OWNER, Running

MASKS = Masks(
    programs=("wget",), hidden=("/etc/hostname", "/**/*.pem", "/workspace/.env"), readonly=("/workspace/keep/**",)
)
STEPS: list[tuple[object, str]] = [
    (GvisorProvider, "_write"),
    (GvisorProvider, "_order"),
    (Stagers, "start"),
    (provider, "waiting_supervisor"),
    (provider, "_pid"),
    (provider, "_gofer"),
    (late_mounts.Sandbox, "mount"),
    (late_masks, "cover"),
    (WaitingSupervisor, "begin"),
    (provider, "_take_socket"),
]
"""The steps of starting and claiming a slot, in their order."""
_UNTIL_CLAIMED = 8
SLOT = os.environ.setdefault("SLOT_OF_TESTS", f"slot-{os.getpid()}")
"""The groups of a sandbox are found by its id, whoever has made them: so two runs must not use the same."""


@pytest.fixture
def place(bundles: Path) -> Iterator[Path]:
    """A short path with a directory for the server, and a workspace."""
    path = Path(tempfile.mkdtemp(prefix="g"))
    path.chmod(0o755)
    for name in ("run", "ws", "ws/keep"):
        (path / name).mkdir()
        os.chown(path / name, SANDBOX_OWNER, SANDBOX_OWNER)
    for name in ("note", ".env", "a.pem", "keep/file"):
        (path / "ws" / name).write_text(f"content of {name}")
    (path / "bundles").symlink_to(bundles)
    yield path
    shutil.rmtree(path)


def launch(place: Path, **terms: Any) -> Launch:
    return Launch(**{"id": "owner", "workspace": str(place / "ws"), "network": Network.NONE, "masks": MASKS, **terms})


@asynccontextmanager
async def opened(place: Path) -> AsyncIterator[GvisorProvider]:
    found = usable(str(place / "bundles"), str(place / "run"))
    try:
        yield found
    finally:
        await found.close()


async def start_slot(of: GvisorProvider, wanted: Launch) -> Handle:
    slot = of.slot_for(wanted)
    assert slot is not None
    return await of.start_slot(replace(slot, id=SLOT))


def processes(id: str) -> list[int]:
    return [pid for group, _ in groups.find(id) for pid in groups.processes(group)]


async def gone(id: str) -> bool:
    return not processes(id)


async def test_an_owner_gets_a_slot_with_everything_of_its_own(place: Path) -> None:
    wanted = launch(place, env={"MINE": "yes"}, memory_mb=256, cpus=0.5, processes=40, disk_mb=1)
    async with opened(place) as gvisor:
        slot = await start_slot(gvisor, wanted)
        assert slot["id"] == SLOT and slot["socket"] == "" and await gvisor.alive(slot)
        handle = await gvisor.claim(slot, wanted)
        with pytest.raises(PlatformError, match="not a slot of this server"):
            await gvisor.claim(slot | {"id": "slot-2"}, wanted)
        box = Running(handle, wanted.workspace)
        try:
            said = await box.run(
                "cat note keep/file; echo $MINE; ulimit -f; id -u; touch new; cat /sys/fs/cgroup/*/pids.max"
            )
            assert said.stdout == "content of notecontent of keep/fileyes\n2048\n1000\n40\n"
            assert (place / "ws/new").stat().st_uid == SANDBOX_OWNER
            limits = [path.read_text() for group, _ in groups.find(SLOT) for path in Path(group).glob("cpu.*")]
            assert any(each in {"50000\n", "50000 100000\n"} for each in limits)
            for denied in ("cat .env", "cat a.pem", "cat /etc/hostname", "wget x", "echo > keep/file", "mv keep kept"):
                assert (await box.run(denied)).exit_code != 0, denied
        finally:
            box.connection.close()
            await gvisor.remove(handle)
        assert await gvisor.running() == []
    assert (place / "ws/.env").read_text() == "content of .env"


async def test_the_agent_finds_one_way_to_the_workspace_and_keeps_no_power(place: Path) -> None:
    """The directory in which the workspace comes is beyond its reach before any code of an agent runs."""
    code = """
import ctypes, os, json
libc = ctypes.CDLL(None, use_errno=True)
mounts = open('/proc/self/mountinfo').read()
status = open('/proc/self/status').read() + open('/proc/1/status').read()
tries = {}
for path in ('/run/carrel', '/run/carrel/private', '/run/carrel/private/late', '/run/carrel/private/late/workspace'):
    try: tries[path] = os.listdir(path)
    except OSError as error: tries[path] = error.strerror
tries['umount'] = libc.umount2(b'/workspace', 2)
tries['bind'] = libc.mount(b'/workspace', b'/tmp', None, 4096, None)
tries['unshare'] = libc.unshare(0x10020000) and 1
found = [line.split()[4] for line in mounts.splitlines()]
caps = {line.split()[1] for line in status.splitlines() if line.startswith('Cap')}
print(json.dumps([tries, found, sorted(caps), os.listdir('/workspace/..') == os.listdir('/')]))
"""
    async with opened(place) as gvisor:
        wanted = launch(place, masks=None)
        handle = await gvisor.claim(await start_slot(gvisor, wanted), wanted)
        box = Running(handle, wanted.workspace)
        try:
            said = await box.run(["python3", "-c", code])
            assert said.stderr == ""
            tries, mounts, capabilities, above = json.loads(said.stdout)
        finally:
            box.connection.close()
            await gvisor.remove(handle)
    assert mounts.count("/workspace") == 1 and not [each for each in mounts if "late" in each]
    assert capabilities == ["0000000000000000"]
    assert above
    assert tries.pop("umount") == -1 and tries.pop("bind") == -1
    tries.pop("unshare")
    assert all(each == "Permission denied" for each in tries.values()), tries


def test_sandboxes_with_equal_slots_differ_in_nothing_that_is_fixed(place: Path) -> None:
    gvisor = usable(str(place / "bundles"), str(place / "run"))
    slot = gvisor.slot_for(launch(place))
    late = {"network": Network.ALLOWLIST, "cpus": 1, "processes": 5, "disk_mb": 9, "env": {"A": "b"}, "trust": True}
    assert slot == gvisor.slot_for(launch(place, **late, id="other", masks=replace(MASKS, readonly=(), writable=())))
    assert slot == gvisor.slot_for(launch(place, masks=replace(MASKS, hidden=MASKS.hidden[:2])))
    for fixed in ({"memory_mb": 64}, {"masks": None}, {"masks": replace(MASKS, hidden=("/etc/passwd",))}):
        assert slot != gvisor.slot_for(launch(place, **fixed))


def in_a_server_that_dies(place: Path, after: int | None) -> Handle | None:
    """Start and claim a slot in another process, which is killed after a step; return the handle if there is one."""
    words = [sys.executable, "-m", __name__, str(place), "" if after is None else str(after)]
    process = subprocess.run(words, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3], timeout=120, check=False)
    assert process.returncode == -signal.SIGKILL
    return json.loads(process.stdout) if process.stdout else None


def main(place: str, after: str) -> None:
    """The program of that process."""
    if after:
        _die_after(*STEPS[int(after)])
    os.write(1, json.dumps(asyncio.run(_start(Path(place)))).encode())
    os.kill(os.getpid(), signal.SIGKILL)


async def _start(place: Path) -> Handle:
    gvisor, wanted = usable(str(place / "bundles"), str(place / "run")), launch(place)
    return await gvisor.claim(await start_slot(gvisor, wanted), wanted)


def _die_after(owner: object, name: str) -> None:
    step: Callable[..., Any] = getattr(owner, name)

    async def wait(result: Any) -> None:
        await result
        os.kill(os.getpid(), signal.SIGKILL)

    def die(*args: object, **named: object) -> Any:
        result = step(*args, **named)
        if asyncio.iscoroutine(result):
            return wait(result)
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    setattr(owner, name, die)


def mounts(place: Path) -> list[str]:
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(place) in line]


def test_a_sandbox_from_a_slot_outlives_its_server(place: Path) -> None:
    handle = in_a_server_that_dies(place, None)
    assert handle is not None

    async def adopt() -> None:
        async with opened(place) as gvisor:
            assert await gvisor.running() == [SLOT] and await gvisor.alive(handle)
            box = Running(handle, "")
            assert (await box.run("cat note")).stdout == "content of note"
            assert (await box.run("cat .env")).exit_code != 0
            box.connection.close()
            await gvisor.remove(handle)
            assert not processes(SLOT) and not list(groups.find(SLOT))

    asyncio.run(adopt())


def test_nothing_is_left_of_a_server_that_is_killed_at_a_step(place: Path, request: pytest.FixtureRequest) -> None:
    """The steps are chosen at random, with a seed; with `--on-gvisor` all are tried."""
    steps = range(len(STEPS))
    chosen = steps if request.config.getoption("--on-gvisor") else random.Random(7).sample(steps, 3)

    async def recover(index: int) -> None:
        if index < _UNTIL_CLAIMED:  # nobody has claimed it: it ends by itself
            await until(lambda: asyncio.ensure_future(gone(SLOT)), what=f"the end of the slot, step {index}")
        async with opened(place) as gvisor:
            assert await gvisor.running() == [SLOT]
            await gvisor.remove({"provider": "gvisor", "id": SLOT, "socket": ""})
            assert await gvisor.running() == []
        assert not processes(SLOT) and not list(groups.find(SLOT))

    for step in chosen:
        assert in_a_server_that_dies(place, step) is None
        asyncio.run(recover(step))
        assert mounts(place) == []
        assert not (place / "run/gvisor").exists()
        assert sorted(os.listdir(place / "ws")) == [".env", "a.pem", "keep", "note"]


if __name__ == "__main__":
    main(*sys.argv[1:])
