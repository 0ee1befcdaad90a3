"""A server whose sandboxes are pods: it is killed, and finds them again; a pod that is lost is started anew."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.cluster.ground import Ground, variables
from tests.support.kill_server import Server

DEADLINE_S = 120


@pytest.fixture
async def server(ground: Ground) -> AsyncIterator[Server]:
    """A server with its data in the shared volume. It keeps one slot of each kind."""
    settings = variables(ground.settings | {"pool.size": "1"})
    made = Server(volumes="directory", settings=settings)
    made.data = ground.volume / "d"
    try:
        await made.start()
        yield made
        await made.stop()
    finally:
        print(made.tail(100))  # pytest shows it where a test fails
        made.close()
    assert ground.left() == []


def pods_of(ground: Ground) -> dict[str, str]:
    """The pods of the namespace: their names and unique ids."""
    found = ground.cluster.get("pods", "-n", ground.name)["items"]
    return {each["metadata"]["name"]: each["metadata"]["uid"] for each in found}


async def until(holds, what: str) -> None:
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not await holds():
                await asyncio.sleep(0.1)
    except TimeoutError:
        pytest.fail(what)


async def test_a_killed_server_finds_its_pods_again(server, ground):
    async with server.client() as carrel:
        box = await carrel.sandbox("c", limits={"memory_mb": 256})
        assert (await box.info()).provider == "kubernetes"
        assert (await box.commands.run("echo kept > file; pwd")).stdout == "/workspace\n"
        command = await box.commands.start(
            "echo before; until test -e go; do sleep 0.05; done; echo after", timeout=300
        )
        own = pods_of(ground)
    server.kill()
    await server.killed()
    await server.start()
    async with server.client() as carrel:
        box = await carrel.sandbox("c")
        await box.files.write("go", b"")
        assert (await box.commands.get(command.id).wait()).stdout == "before\nafter\n"
        assert own.items() & pods_of(ground).items(), "the sandbox is in another pod"

        async def has_slot() -> bool:
            return any(pool.ready for pool in await carrel.pools())

        cold = await carrel.sandbox("cold", limits={"memory_mb": 256})
        assert (await cold.commands.run("echo cold")).stdout == "cold\n"
        assert await carrel.pools(), "no pool is known"
        await until(has_slot, "no slot was made")
        fresh = await carrel.sandbox("d", limits={"memory_mb": 256})
        assert (await fresh.commands.run("ls file; echo new > file; cat file")).stdout == "new\n"
        assert any(pool.claimed for pool in await carrel.pools()), "the sandbox did not come from a slot"


async def test_a_lost_pod_is_noticed_and_its_files_are_there(server, ground):
    async with server.client() as carrel:
        box = await carrel.sandbox("lost")
        await box.commands.run("echo kept > file")
        before = pods_of(ground)
        ground.cluster.kubectl("delete", "pods", "--all", "-n", ground.name, "--wait=true")

        async def works() -> bool:
            again = await carrel.sandbox("lost")
            return (await again.commands.run("cat file")).stdout == "kept\n"

        await until(works, "the sandbox did not come back")
        assert not before.items() & pods_of(ground).items()
