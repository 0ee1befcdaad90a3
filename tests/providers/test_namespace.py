"""What the namespace provider promises of limits, and that it works for an ordinary user too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from carrel.isolation import probe
from carrel.providers import Capability
from sandboxes import KINDS, ROOT, House, until

pytestmark = pytest.mark.skipif("namespace" not in KINDS, reason="this host cannot make such sandboxes")
CONTROLLERS = probe.host().controllers


@pytest.fixture
async def mine(houses: dict[str, House]) -> AsyncIterator[House]:
    house = House("namespace", houses["namespace"].directory)
    yield house
    await house.provider.close()


def test_limits_are_promised_only_where_they_can_be_kept(mine: House) -> None:
    promised = mine.provider.capabilities()
    assert {Capability.FILE_ISOLATION, Capability.NETWORK_NONE, Capability.LIMIT_PROCESSES} <= promised
    assert (Capability.LIMIT_CPUS in promised) is ("cpu" in CONTROLLERS)
    assert Capability.NETWORK_HOST not in promised


async def test_memory_over_the_limit_is_killed_and_counted(mine: House) -> None:
    async with mine.box(memory_mb=64) as box:
        assert await mine.provider.out_of_memory_kills(box.handle) == 0
        other = await box.supervisor.start("sleep 60")
        result = await box.supervisor.run(["python3", "-c", "x = bytearray(200 << 20); print(len(x))"])
        assert result["stdout"] == ""
        assert (await box.supervisor.info(other))["running"]
        used = await mine.provider.memory_bytes(box.handle)
        assert used is not None
        assert 0 < used <= 64 << 20
        assert (await box.supervisor.run("echo on"))["stdout"] == "on\n"
        if "memory" in CONTROLLERS:
            assert result["signal"] == "SIGKILL"
            assert await mine.provider.out_of_memory_kills(box.handle) == 1


async def test_a_small_sandbox_remembers_its_commands(mine: House) -> None:
    async with mine.box(memory_mb=64) as box:
        for number in range(3):
            await box.supervisor.run(f"echo {number}")
        assert len((await box.supervisor.ask("GET", "/commands"))["items"]) == 3


@pytest.mark.skipif("cpu" not in CONTROLLERS, reason="this user cannot limit CPU time")
async def test_cpu_below_one_core_is_enforced(mine: House) -> None:
    script = "import time\nb=time.monotonic(); c=time.process_time()\nwhile time.monotonic()-b<1: pass\nprint(time.process_time()-c)"
    async with mine.box(cpus=0.25) as box:
        used = float((await box.supervisor.run(["python3", "-c", script]))["stdout"])
        assert 0.05 < used < 0.5


async def test_the_number_of_processes_is_limited(mine: House) -> None:
    async with mine.box(processes=20) as box:
        result = await box.supervisor.run("for i in $(seq 40); do sleep 5 & done; wait", timeout=5)
        assert result["exit_code"] != 0
        assert "fork" in result["stderr"].lower()


async def test_a_single_file_cannot_outgrow_the_disk_limit(mine: House) -> None:
    async with mine.box(disk_mb=1) as box:
        await box.supervisor.run("head -c 3000000 /dev/zero > big")
        assert (box.workspace / "big").stat().st_size <= 1 << 20


async def test_usage_of_an_unknown_sandbox_is_not_known(mine: House) -> None:
    handle = {"provider": "namespace", "id": "nobody", "socket": "/nowhere", "pid": 0, "start_time": 0}
    assert await mine.provider.out_of_memory_kills(handle) == 0
    assert await mine.provider.memory_bytes(handle) is None
    assert not await mine.provider.alive(handle)
    await mine.provider.remove(handle)


async def test_inside_nothing_of_the_host_is_seen(mine: House) -> None:
    async with mine.box() as box:
        supervisor = box.supervisor
        assert (await supervisor.run("hostname"))["stdout"] == "carrel\n"
        assert "host" not in (await supervisor.run("cat /proc/1/cmdline | tr '\\0' ' '"))["stdout"]
        capabilities = (await supervisor.run("grep -E 'Cap|NoNewPrivs|Seccomp:' /proc/self/status"))["stdout"].split()
        assert dict(zip(capabilities[::2], capabilities[1::2], strict=True)) == {
            "CapInh:": "0" * 16,
            "CapPrm:": "0" * 16,
            "CapEff:": "0" * 16,
            "CapBnd:": "0" * 16,
            "CapAmb:": "0" * 16,
            "NoNewPrivs:": "1",
            "Seccomp:": "2",
        }
        assert (await supervisor.run("ls /proc/1/root /proc/1/fd"))["exit_code"] != 0


SELECTION = [
    "tests/providers/test_namespace.py",
    "tests/providers/test_zygote_provider.py",
    "tests/providers/test_process.py",
    "tests/isolation/test_zygote.py",
    "tests/isolation/test_cgroups.py",
    "tests/supervisor/test_app.py",
]
WORDS = "memory or outlive or fails or inside or execute or terminal or secrets or opened or cancelled or spare"


@pytest.mark.skipif(not ROOT, reason="this is an ordinary user already")
def test_all_this_works_for_an_ordinary_user(tmp_path: Path) -> None:
    """The checkout may not be readable to others, so it is seen through bind mounts in a mount namespace."""
    repository = Path(__file__).parents[2]
    home = Path(tempfile.mkdtemp(prefix="u"))
    try:
        for name in ("repo", "venv", "tmp"):
            (home / name).mkdir()
        (home / "tmp").chmod(0o777)
        home.chmod(0o755)
        script = f"""
            set -e
            mount --bind {repository} {home}/repo
            mount --bind {sys.prefix} {home}/venv
            cd {home}/repo
            exec setpriv --reuid 65534 --regid 65534 --clear-groups -- env -i PATH=$PATH HOME={home}/tmp \\
                TMPDIR={home}/tmp PYTHONPATH={home}/repo/src PYTHONDONTWRITEBYTECODE=1 \\
                {home}/venv/bin/python -m pytest -q -p no:cacheprovider --tb=short {" ".join(SELECTION)} -k '{WORDS}'
        """
        run = subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert run.returncode == 0, run.stdout + run.stderr
        assert "passed" in run.stdout
    finally:
        shutil.rmtree(home)


async def test_opened_sandbox_ends_with_its_first_process(mine: House) -> None:
    launch = mine.launch()
    handle = await mine.provider.start(launch)
    os.kill(int(handle["pid"] or 0), 9)

    async def gone() -> bool:
        return not await mine.provider.alive(handle)

    await until(gone)
    await mine.provider.remove(handle)
    shutil.rmtree(launch.workspace)
