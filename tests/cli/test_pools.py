from __future__ import annotations

import json
import os
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from tests.cli.conftest import environment
from tests.support.cli_process import CliServer
from tests.support.sandboxes import until
from tests.support.slot_server import SlotServer

from carrel.errors import Denied, InvalidRequest, NotFound
from carrel.isolation import probe

Carrel = Callable[..., subprocess.CompletedProcess[bytes]]


@pytest.fixture
async def slot_server(carrel_forks: None) -> AsyncIterator[SlotServer]:
    server = SlotServer(volumes="directory")
    try:
        await server.start()
        yield server
        await server.stop()
        await server.silent(set())
    finally:
        server.close()


@pytest.mark.skipif(
    os.geteuid() != 0 or probe.host().missing is not None, reason="needs root and the namespace provider"
)
async def test_pools_are_shown_and_resized(slot_server: SlotServer, cli_server: CliServer) -> None:
    def carrel(*words: str, code: int = 0) -> str:
        done = subprocess.run(
            cli_server.command(*words), capture_output=True, env=environment(slot_server.data), timeout=60, check=False
        )
        assert done.returncode == code, done.stderr
        return (done.stderr if code else done.stdout).decode()

    async with slot_server.client() as client:
        assert carrel("pool", "ls") == "" and json.loads(carrel("pool", "ls", "--json")) == []
        assert await client.resize_pool("namespace", 3) == []
        async with await client.sandbox(template="coding") as box:
            assert (await box.commands.run("echo hi")).stdout == "hi\n"

        async def full() -> bool:
            return [pool.ready for pool in await client.pools()] == [3]

        await until(full, what="three slots")
        async with await client.sandbox(template="coding"):
            pass
        await until(full, what="three slots again")
        heading, row = carrel("pool", "ls").splitlines()
        assert heading.split() == [
            "PROVIDER", "TEMPLATE", "IMAGE", "MEMORY", "READY", "STARTING", "WANTED", "CLAIMED", "COLD", "LAST", "FAILURE",
        ]  # fmt: skip
        assert row.split() == ["namespace", "coding", "-", "2048", "MB", "3", "0", "3", "1", "1", "-"]
        [listed] = json.loads(carrel("pool", "ls", "--json"))
        assert (listed["template"], listed["claimed"], listed["max"]) == ("coding", 1, 8)
        assert carrel("pool", "resize", "coding", "0").splitlines()[1].split()[-4:] == ["0", "1", "1", "-"]

        async def empty() -> bool:
            return slot_server.sandboxes() == set()

        await until(empty, what="no slots")
        assert "there is no provider and no template 'codign'" in carrel("pool", "resize", "codign", "1", code=1)
        for name, size, error in (
            ("nothing", 1, NotFound),
            ("namespace", 9, InvalidRequest),
            ("namespace", -1, InvalidRequest),
        ):
            with pytest.raises(error):
                await client.resize_pool(name, size)
        made = await client.tokens.create("coder", kind="agent", scopes=["operate"])
        async with type(client)(client.url, made.token) as agent:
            assert len(await agent.pools()) == 1
            with pytest.raises(Denied):
                await agent.resize_pool("namespace", 1)
        records = [record async for record in client.audit.search(name="resize_pool")]
        assert records[-1].arguments == {"pool": "namespace", "size": 3}


def test_a_provider_that_starts_quickly_has_no_pool(carrel: Carrel, data_dir: Path) -> None:
    done = carrel("pool", "resize", "namespace", "2")
    assert done.returncode == 1 and b"has no pool: its sandboxes start in milliseconds" in done.stderr
    assert carrel("pool", "ls").stdout == b""
