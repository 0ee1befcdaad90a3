"""The zygote as a process: spares, its own world, and its end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.support.sandboxes import KINDS, House, Supervisor, parent, provider, until

from carrel.providers.zygotes import ZygoteClient


def sandboxes_of(zygote: int) -> list[int]:
    """The children of a zygote but the forker, which is in the same PID namespace."""
    found = Path(f"/proc/{zygote}/task/{zygote}/children").read_text().split()
    return [int(pid) for pid in found if pid_namespace(pid) not in {None, pid_namespace(str(zygote))}]


def pid_namespace(pid: str) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except FileNotFoundError:
        return None
    except PermissionError:  # an ordinary user may not look into a sandbox
        return -1


@pytest.mark.skipif("namespace" not in KINDS, reason="this host cannot make such sandboxes")
async def test_spares_are_kept_ready_and_taken() -> None:
    async with provider("namespace") as house, house.box() as first:
        zygote = parent(first.pid)
        await until(lambda: len(sandboxes_of(zygote)) == 3, what="two spares")
        spares = set(sandboxes_of(zygote)) - {first.pid}
        async with house.box() as second:
            assert second.pid in spares
            await until(lambda: len(sandboxes_of(zygote)) == 4, what="a new spare")
            for spare in set(sandboxes_of(zygote)) - {first.pid, second.pid}:
                os.kill(spare, signal.SIGKILL)  # a spare that dies is no harm
            await until(lambda: set(sandboxes_of(zygote)) == {first.pid, second.pid}, what="the end of the spares")
            async with house.box() as third:
                assert (await third.supervisor.run("echo on"))["stdout"] == "on\n"


@pytest.mark.parametrize("kind", KINDS)
async def test_it_ends_by_itself_when_nobody_needs_it(kind: str) -> None:
    async with provider(kind) as house:
        async with house.box() as box:
            zygote = parent(box.pid)
        assert Path(f"/proc/{zygote}").exists()
        await house.provider.close()
        assert not Path(f"/proc/{zygote}").exists()
        assert os.listdir(house.directory / "run") == []


@pytest.mark.parametrize("kind", KINDS)
async def test_told_to_end_it_takes_its_sandboxes_along(kind: str) -> None:
    async with provider(kind) as house:
        handle = await house.provider.start(house.launch())
        supervisor = Supervisor(str(handle["socket"]))
        await supervisor.start("(setsid sleep 4321 &) ; sleep 4321")
        await supervisor.http.aclose()
        run, workspaces = str(house.directory / "run"), str(house.directory / "ws")
        client = ZygoteClient(run, workspaces, plain=kind == "process")
        await client.request("stop")
        await client.close()

        async def gone() -> bool:
            return not await house.provider.alive(handle)

        await until(gone)
        await house.provider.remove(handle)


async def test_its_command_line_names_nothing_of_the_host(houses: dict[str, House]) -> None:
    for kind in KINDS:
        house = House(kind, houses[kind].directory)
        async with house.box() as box:
            for pid in (box.pid, parent(box.pid)):
                assert Path(f"/proc/{pid}/cmdline").read_bytes().strip(b"\0") == b"carrel"
        await house.provider.close()


async def test_many_starts_and_ends_leave_no_descriptor_in_the_zygote(house: House) -> None:
    async with house.box() as box:
        zygote = parent(box.pid)

        def now() -> tuple[int, int]:
            return len(sandboxes_of(zygote)), len(os.listdir(f"/proc/{zygote}/fd"))

        for _ in range(3):
            async with house.box():
                pass
        seen = [now()]

        def steady() -> bool:  # those before have ended, and their spares are there
            seen.append(now())
            return len(set(seen[-50:])) == 1 and len(seen) > 50

        await until(steady, what="a zygote that has nothing to do")
        spares, before = now()
        for _ in range(10):
            async with house.box():
                pass
        await until(lambda: now()[0] == spares and now()[1] <= before, what="as many as before")
