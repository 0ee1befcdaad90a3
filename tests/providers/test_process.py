"""The process provider promises nothing, and says so."""

from __future__ import annotations

import os

from tests.support.sandboxes import House, provider

from carrel.providers import Capability


async def test_it_runs_as_whoever_runs_carrel_and_promises_no_isolation(houses: dict[str, House]) -> None:
    house = houses["process"]
    assert house.provider.capabilities() == {
        Capability.NETWORK_HOST,
        Capability.TERMINAL,
        Capability.SURVIVES_RESTART,
    }
    assert (house.provider.isolation_level, house.provider.unsafe) == (0, True)
    mine = House("process", house.directory)
    async with mine.box() as box:
        assert (await box.supervisor.run("id -u"))["stdout"] == f"{os.geteuid()}\n"
        assert (await box.supervisor.run("pwd"))["stdout"] == f"{box.workspace}\n"
    await mine.provider.close()


async def test_secrets_of_the_environment_do_not_reach_commands() -> None:
    os.environ["CARREL_TEST_SECRET"] = "hush"
    try:
        async with provider("process") as house, house.box() as box:
            assert "hush" not in (await box.supervisor.run("env"))["stdout"]
    finally:
        del os.environ["CARREL_TEST_SECRET"]


async def test_it_leaves_nothing_when_closed() -> None:
    async with provider("process") as house:
        async with house.box():
            pass
        await house.provider.close()
        assert os.listdir(house.directory / "run") == []
