"""Parts of a cluster fail while clients work in sandboxes: work goes on or pauses, and nothing is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest
from tests.cluster.load import DEADLINE_S, under_load, until

from carrel.client import AsyncClient
from carrel.errors import CarrelError

if TYPE_CHECKING:
    from tests.cluster.installation import Installation

NODE = "node1"


@pytest.fixture
async def carrel(installation: Installation) -> AsyncIterator[AsyncClient]:
    async with installation.client() as client:
        yield client


def evict(installation: Installation, pod: str) -> str:
    """Evict a pod; return what the API says if it refuses."""
    place = f"/api/v1/namespaces/{installation.name}/pods/{pod}/eviction"
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    try:
        installation.cluster.kubectl("create", "--raw", place, "-f", "-", stdin=body)
    except AssertionError as error:
        return str(error)
    return ""


async def test_an_evicted_sandbox_starts_again_with_its_files(carrel, installation) -> None:
    before = installation.pods()
    async with under_load(carrel, "evicted") as load:
        own = [name for name in installation.pods() if name not in before]
        for pod in own:
            assert evict(installation, pod) == ""
        await load.goes_on("the sandbox does not come back")


async def test_one_server_at_a_time_can_be_evicted(carrel, installation) -> None:
    async with under_load(carrel, "servers") as load:
        assert evict(installation, "carrel-0") == ""
        assert "disruption budget" in evict(installation, "carrel-1")
        await load.goes_on("nobody answers")

        async def again() -> bool:
            return evict(installation, "carrel-1") == ""

        await until(again, "the evicted server does not come back")
        await load.goes_on("nobody answers after the second")


async def test_while_the_node_is_drained_sandboxes_wait_for_another(carrel, installation) -> None:
    kubectl = installation.cluster.kubectl
    async with under_load(carrel, "drained") as load:
        before = installation.pods()
        kubectl("drain", NODE, "--pod-selector=carrel/sandbox", "--force", "--delete-emptydir-data", "--grace-period=1")
        try:

            async def waits() -> bool:
                found = installation.cluster.get("pods", "-n", installation.name, "-l", "carrel/sandbox")["items"]
                return "unschedulable" in json.dumps([each["status"] for each in found])

            await until(waits, "no sandbox waits for a node")
        finally:
            kubectl("uncordon", NODE)
        await load.goes_on("the sandbox does not start on a node that is back")
        assert not before.items() & installation.pods().items()


async def test_without_the_api_server_sandboxes_work_on(carrel, installation) -> None:
    async with under_load(carrel, "no-api") as load:
        installation.cluster.freeze("kube-apiserver")
        try:
            count, said = load.appended["no-api"], len(load.said)
            with pytest.raises(CarrelError) as refusal:
                async with asyncio.timeout(DEADLINE_S):  # more than one request has to time out
                    await carrel.sandbox("new-without-api", trust="low")
            assert "Kubernetes API" in refusal.value.detail
            await load.goes_on("sandboxes do not work without the API server")
            assert load.appended["no-api"] > count
            assert load.said[said:] == []
        finally:
            installation.cluster.thaw("kube-apiserver")
        await load.goes_on("sandboxes do not work after it")

        async def starts() -> bool:
            try:
                return (await (await carrel.sandbox("new-without-api")).commands.run("echo on")).stdout == "on\n"
            except CarrelError:
                return False

        await until(starts, "no sandbox starts after it")


async def test_without_the_database_for_10_s_work_pauses(carrel, installation) -> None:
    async with under_load(carrel, "no-database") as load:
        box = await carrel.sandbox("no-database")
        command = await box.commands.start("for i in $(seq 40); do echo $i; sleep 0.5; done", timeout=100)
        installation.freeze("postgres")
        try:
            await asyncio.sleep(10)  # the length of the outage
        finally:
            installation.thaw("postgres")
        await load.goes_on("work does not go on")
        assert (await command.wait()).stdout.split() == [str(number + 1) for number in range(40)]
        assert set(load.said) <= {"database_unavailable", "server_unreachable", "node_unreachable"}


async def test_without_the_archive_for_a_minute_work_goes_on(carrel, installation) -> None:
    box = await carrel.sandbox("no-archive")
    await box.files.write("kept", b"before")
    async with under_load(carrel, "no-archive-load") as load:
        installation.freeze("s3")
        try:
            stopping = asyncio.ensure_future(box.stop())
            for _ in range(6):
                await asyncio.sleep(10)  # the length of the outage
                await load.goes_on("work does not go on without the archive")
            assert load.said == []
        finally:
            installation.thaw("s3")
        await stopping
        again = await carrel.sandbox("no-archive")
        assert await again.files.read("kept") == b"before"
