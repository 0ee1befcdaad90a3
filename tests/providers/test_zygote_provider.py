"""Starting, finding and removing sandboxes, with a zygote that may die."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import signal
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from tests.support.sandboxes import KINDS, ROOT, House, Supervisor, parent, provider, status, until

from carrel.errors import InvalidRequest, PlatformError, Unsupported
from carrel.providers import Capability, Masks, foreign_processes
from carrel.providers.zygotes import ZygoteClient


def groups(zygote: int) -> list[Path]:
    return [*Path("/sys/fs/cgroup").glob(f"carrel-{zygote}-*"), *Path("/sys/fs/cgroup").glob(f"*/carrel-{zygote}-*")]


async def test_a_handle_is_a_flat_json_value_and_removal_may_be_repeated(house: House) -> None:
    launch = house.launch(env={"A": "from launch"})
    handle = await house.provider.start(launch)
    assert {"provider", "id", "socket"} <= handle.keys()
    assert (handle["provider"], handle["id"]) == (house.kind, launch.id)
    assert await house.provider.alive(handle)
    supervisor = Supervisor(str(handle["socket"]))
    assert (await supervisor.run("echo $A"))["stdout"] == "from launch\n"
    await supervisor.http.aclose()
    for _ in range(2):
        await house.provider.remove(handle)
        assert not await house.provider.alive(handle)
    assert not Path(str(handle["socket"])).exists()
    assert Path(launch.workspace).is_dir()
    shutil.rmtree(launch.workspace)


async def test_what_runs_is_known_and_can_be_ended_by_its_id_alone(house: House) -> None:
    launch = house.launch()
    handle = await house.provider.start(launch)
    another = house.another_provider()
    try:
        assert launch.id in await another.running()
        await another.remove({"provider": house.kind, "id": launch.id, "socket": ""})
        assert launch.id not in await another.running()
        assert not await house.provider.alive(handle)
        await house.provider.remove(handle)
    finally:
        await another.close()
    shutil.rmtree(launch.workspace)


async def test_files_appear_on_the_host_with_the_canonical_owner(house: House) -> None:
    async with house.box() as box:
        await box.supervisor.run("mkdir d; echo x > d/f")
        made = (box.workspace / "d" / "f").stat()
        assert made.st_uid == (1000 if ROOT and box.isolated() else os.geteuid())


@pytest.mark.parametrize("kind", KINDS)
async def test_a_start_that_fails_says_why_and_leaves_nothing(kind: str) -> None:
    async with provider(kind) as house:
        launch = house.launch(workspace=str(house.directory / "ws" / "missing"))
        for _ in range(3):
            with pytest.raises(PlatformError, match="No such file"):
                await house.provider.start(launch)
        for name in ("..", "", "a/b"):
            with pytest.raises(PlatformError):
                await house.provider.start(dataclasses.replace(launch, workspace=f"{name}"))
        assert [name for name in os.listdir(house.directory / "run") if not name.startswith("zygote-")] == []
        async with house.box() as box:
            assert (await box.supervisor.run("echo on"))["stdout"] == "on\n"


@pytest.mark.parametrize("kind", KINDS)
async def test_two_of_one_name_are_refused_and_the_first_lives(house: House, kind: str) -> None:
    launch = house.launch()
    handle = await house.provider.start(launch)
    with pytest.raises(PlatformError, match="already"):
        await house.provider.start(launch)
    assert await house.provider.alive(handle)
    await house.provider.remove(handle)


async def test_a_socket_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    house = House("process", deep)
    with pytest.raises(PlatformError, match="shorter path"):
        await house.provider.start(house.launch())
    await house.provider.close()


async def test_masks_are_worn_or_refused(house: House) -> None:
    launch = house.launch(masks=Masks(("base64",), refusal={"base64": "no"}))
    if Capability.MASKS not in house.provider.capabilities():
        with pytest.raises(Unsupported) as caught:
            await house.provider.start(launch)
        assert caught.value.extra["capabilities"] == ["masks"]
    else:
        for _ in range(3):  # the second time from what the zygote remembers, and from spares
            handle = await house.provider.start(launch)
            supervisor = Supervisor(str(handle["socket"]))
            result = await supervisor.run("base64 --version")
            assert (result["exit_code"], result["stdout"], result["stderr"]) == (126, "", "no\n")
            await supervisor.http.aclose()
            await house.provider.remove(handle)
        async with house.box() as box:
            assert (await box.supervisor.run("base64 --version"))["exit_code"] == 0
    shutil.rmtree(launch.workspace)


@pytest.mark.parametrize("bad", [Masks(("../x",)), Masks((), ("/proc/**",)), Masks(writable=("/etc",))])
@pytest.mark.skipif("namespace" not in KINDS, reason="this host cannot make such sandboxes")
async def test_masks_that_are_no_masks_start_nothing(houses: dict[str, House], bad: Masks) -> None:
    house = House("namespace", houses["namespace"].directory)
    launch = house.launch(masks=bad)
    with pytest.raises((InvalidRequest, Unsupported)):
        await house.provider.start(launch)
    assert launch.id not in await house.provider.running()
    await house.provider.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_the_zygote_checks_masks_itself(houses: dict[str, House], kind: str) -> None:
    house = House(kind, houses[kind].directory)
    launch = house.launch()
    client = ZygoteClient(str(house.directory / "run"), str(house.directory / "ws"), plain=kind == "process")
    listener, masks = os.memfd_create("listener"), os.memfd_create("masks")
    body = {"id": launch.id, "workspace": os.path.basename(launch.workspace)}
    try:
        for content in (b"{}", b'{"programs": ["../x"], "hidden": [], "writable": null, "refusal": {}}'):
            os.pwrite(masks, content, 0)
            with pytest.raises(PlatformError, match="cannot have masks" if kind == "process" else "malformed|absolute"):
                await client.request("start", (listener, masks), masked=True, **body)
        for fds, more in (((listener,), {"masked": True}), ((listener, masks), {}), ((), {})):
            with pytest.raises(PlatformError, match="carries"):
                await client.request("start", fds, **more, **body)
        assert launch.id not in await house.provider.running()
        async with house.box() as box:
            assert (await box.supervisor.run("echo on"))["stdout"] == "on\n"
    finally:
        os.close(listener)
        os.close(masks)
        await client.close()
        await house.provider.close()


async def test_thirty_at_once(house: House) -> None:
    launches = [house.launch(processes=64) for _ in range(30)]
    handles = await asyncio.gather(*(house.provider.start(launch) for launch in launches))
    assert len({handle["pid"] for handle in handles}) == 30
    supervisors = [Supervisor(str(handle["socket"])) for handle in handles]
    results = await asyncio.gather(*(each.run(f"echo {n}; pwd > f") for n, each in enumerate(supervisors)))
    assert [result["stdout"] for result in results] == [f"{number}\n" for number in range(30)]
    assert all((Path(launch.workspace) / "f").exists() for launch in launches)
    await asyncio.gather(*(each.http.aclose() for each in supervisors))
    await asyncio.gather(*(house.provider.remove(handle) for handle in handles))
    assert not any([await house.provider.alive(handle) for handle in handles])


async def test_a_start_that_is_cancelled_leaves_no_sandbox(house: House) -> None:
    async with house.box() as box:
        zygote = parent(box.pid)
        run = house.directory / "run"
        before = set(os.listdir(run))
        for _ in range(5):
            task = asyncio.create_task(house.provider.start(house.launch()))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await until(lambda: set(os.listdir(run)) <= before, what="no socket of theirs")
        assert parent(box.pid) == zygote


async def test_a_start_that_is_cancelled_can_be_tried_again_at_once(house: House) -> None:
    async with house.box():
        launch = house.launch()
        for turns in range(8):
            task = asyncio.create_task(house.provider.start(launch))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):  # a quick one may have been started already
                await house.provider.remove(await task)
        handle = await house.provider.start(launch)
        await house.provider.remove(handle)


@pytest.mark.parametrize("kind", KINDS)
async def test_sandboxes_outlive_the_control_plane(kind: str) -> None:
    async with provider(kind) as house:
        handle = await house.provider.start(house.launch())
        await house.provider.close()
        house.provider = house.another_provider()
        assert await house.provider.alive(handle)
        async with house.box() as box:  # the same zygote serves the new one
            assert parent(box.pid) == parent(int(handle["pid"] or 0))
        await house.provider.remove(handle)
        assert not await house.provider.alive(handle)


@pytest.mark.parametrize("kind", KINDS)
async def test_sandboxes_outlive_their_zygote_and_are_removed_without_it(kind: str) -> None:
    async with provider(kind) as house:
        handle = await house.provider.start(house.launch())
        second = await house.provider.start(house.launch())
        zygote = parent(int(handle["pid"] or 0))
        supervisor = Supervisor(str(handle["socket"]))
        name = await supervisor.start("(setsid sleep 4321 &); sleep 4321")
        await supervisor.ask("GET", "/health")
        os.kill(zygote, signal.SIGKILL)
        await until(lambda: parent(int(handle["pid"] or 0)) != zygote, what="the end of the zygote")
        await house.provider.close()
        house.provider = house.another_provider()
        assert await house.provider.alive(handle)
        assert (await supervisor.info(name))["running"]
        await supervisor.http.aclose()
        await house.provider.remove(handle)
        assert not await house.provider.alive(handle)
        assert await house.provider.alive(second)
        async with house.box() as box:  # a new zygote beside the old sandbox
            assert (await box.supervisor.run("echo on"))["stdout"] == "on\n"
            assert await house.provider.alive(second)
        await house.provider.remove(second)
        await until(lambda: groups(zygote) == [], what="the removal of the cgroups")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_provider_whose_zygote_died_starts_another(kind: str) -> None:
    async with provider(kind) as house:
        handle = await house.provider.start(house.launch())
        zygote = parent(int(handle["pid"] or 0))
        await house.provider.remove(handle)
        os.kill(zygote, signal.SIGKILL)

        async def again() -> bool:
            try:
                async with house.box() as box:
                    return parent(box.pid) != zygote
            except PlatformError:
                return False

        assert await until(again)


async def test_removal_ends_everything_inside(house: House) -> None:
    async with house.box() as box:
        for _ in range(3):
            await box.supervisor.start("trap '' TERM; (setsid sh -c 'sleep 4321 & sleep 4321' &); sleep 4321")
        await until(lambda: box.count("sleep 4321") == 9, what="nine sleepers")
    # what was left would now be seen by the leak check


@pytest.mark.skipif(not ROOT, reason="an ordinary user has one id")
async def test_each_sandbox_has_host_ids_of_its_own(houses: dict[str, House]) -> None:
    house = House("namespace", houses["namespace"].directory)
    async with house.box() as one, house.box() as two:
        ids = {int(status(box.pid)["Uid"].split()[0]) for box in (one, two)}
        assert len(ids) == 2
        assert all(number > 65536 for number in ids)
        assert (await one.supervisor.run("id -u"))["stdout"] == "1000\n"
    await house.provider.close()


async def test_a_pause_that_is_cancelled_stops_nothing_afterwards(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def stop_below(pid: int) -> bool:
        began.set()
        assert go_on.wait(30)
        ended.set()
        return True

    monkeypatch.setattr(foreign_processes, "stop_below", stop_below)
    async with house.box() as box:
        pause = asyncio.create_task(house.provider.pause(box.handle))
        await until(began.is_set, what="the pause to begin")
        pause.cancel()
        await asyncio.wait([pause], timeout=0.05)
        assert not pause.done(), "it is still stopping processes"
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await pause
        assert ended.is_set()
