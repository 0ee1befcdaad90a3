"""MCP servers as users have them: published ones, from Python's index and from npm, and many contexts at once."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from tests.support.mcp_hosted import GOOD

from carrel.audit.records import chain_of
from carrel.audit.search import Filter
from carrel.client import AsyncClient, AsyncSandbox
from carrel.config import load
from carrel.server import RunningServer, running

CONTEXTS, CALLS = 50, 8


@pytest.fixture
async def server(forked: None) -> AsyncIterator[RunningServer]:
    path = tempfile.mkdtemp(prefix="carrel-t-")
    flags = {"data_dir": path, "port": 0, "volumes": "directory", "max_sandboxes": 2 * CONTEXTS}
    async with running(load(flags, environ={})) as server:
        yield server
    shutil.rmtree(path)


@pytest.fixture
async def client(server: RunningServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.url, server.token, timeout=120) as client:
        yield client


@asynccontextmanager
async def outside(server: RunningServer, box: AsyncSandbox, name: str) -> AsyncIterator[Client]:
    """The official client at the URL of a server."""
    headers = {"authorization": f"Bearer {server.token}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=60) as http,
        Client(streamable_http_client(box.mcp.url(name), http_client=http)) as client,
    ):
        yield client


async def test_a_published_server_from_pythons_index(server: RunningServer, client: AsyncClient) -> None:
    box = await client.sandbox("clock")
    info = await box.mcp.add("time", ["mcp-server-time"], requirements=["mcp-server-time"])
    assert info.discovery_error is None and info.environment is not None
    assert {each.qualified for each in await box.mcp.tools()} == {"time:get_current_time", "time:convert_time"}
    told = await box.mcp.call("time", "get_current_time", timezone="Europe/Berlin")
    assert not told.is_error and "Europe/Berlin" in told.text
    wrong = await box.mcp.call("time", "get_current_time", timezone="Nowhere")
    assert wrong.is_error
    async with outside(server, box, "time") as direct:
        listed = await direct.list_tools()
        assert {each.name for each in listed.tools} == {"get_current_time", "convert_time"}
        answer = await direct.call_tool("get_current_time", {"timezone": "UTC"})
        assert not answer.is_error and "UTC" in answer.content[0].text  # type: ignore[union-attr]


async def test_a_published_server_from_npm(server: RunningServer, client: AsyncClient) -> None:
    if shutil.which("npm") is None:
        pytest.skip("this host has no npm")
    asked = subprocess.run(["npm", "config", "get", "registry"], capture_output=True, text=True, check=True)
    host = urlsplit(asked.stdout.strip()).hostname or ""
    found = await asyncio.get_running_loop().getaddrinfo(host, 443, type=socket.SOCK_STREAM)
    reached = [host, *sorted({str(each[4][0]) for each in found})]
    allow = [
        *(f"network(outbound:{each})" for each in reached),
        "shell(npm install:*)",
        "shell(mcp-server-everything:*)",
    ]
    rules = {"permissions": {"allow": [*allow, "mcp(everything:*)"], "deny": ["mcp(everything:get-env)"]}}
    await client.policy("all").put(settings=rules)
    box = await client.sandbox("all", network="allowlist")
    package = "@modelcontextprotocol/server-everything"
    info = await box.mcp.add("everything", ["mcp-server-everything", "stdio"], npm=[package])
    assert info.discovery_error is None and info.tools > 5
    assert (await box.mcp.call("everything", "echo", message="hi")).text == "Echo: hi"
    image = await box.mcp.call("everything", "get-tiny-image")
    assert any(each["type"] == "image" and each["data"] for each in image.content)
    steps: list[float] = []

    async def progress(progress: float, total: float | None, message: str | None) -> None:
        steps.append(progress)

    async with outside(server, box, "everything") as direct:
        long = {"duration": 0.3, "steps": 3}
        answer = await direct.call_tool("trigger-long-running-operation", long, progress_callback=progress)
        assert not answer.is_error and len(steps) == 3
        denied = await direct.call_tool("get-env", {})
        assert denied.is_error and "mcp(everything:get-env)" in denied.content[0].text  # type: ignore[union-attr]
        assert (await direct.list_prompts()).prompts and (await direct.list_resources()).resources
    await box.stop()
    assert (await box.mcp.call("everything", "echo", message="again")).text == "Echo: again"


async def test_many_contexts_at_once(server: RunningServer, client: AsyncClient) -> None:
    """No answer goes to another context or comes from another server, and every call is written down once."""
    gate = asyncio.Semaphore(8)

    async def make(number: int) -> AsyncSandbox:
        async with gate:
            box = await client.sandbox(f"c{number}")
            await box.files.write("good.py", GOOD.encode())
            for name in ("one", "two"):
                command = ["python3", "good.py", name]
                await box.mcp.add(name, command, variables={"CONTEXT": f"c{number}"}, enabled=False)
                await box.mcp.start(name)
            return box

    boxes = await asyncio.gather(*(make(number) for number in range(CONTEXTS)))

    async def use(number: int, box: AsyncSandbox) -> Counter[str]:
        chance = random.Random(number)
        done: Counter[str] = Counter()
        for call in range(CALLS):
            name = chance.choice(("one", "two"))
            if chance.random() < 0.5:
                told = await box.mcp.call(name, "whoami")
                assert told.text.split()[:2] == [name, f"c{number}"]
            else:
                told = await box.mcp.call(name, "echo", text=f"{number} {name} {call}")
                assert told.text == f"{number} {name} {call}"
            done[name] += 1
        return done

    counts = await asyncio.gather(*(use(number, box) for number, box in enumerate(boxes)))
    plane = server.plane
    await plane.audit.flush()
    for number, done in enumerate(counts):
        page = await plane.audit.search(Filter(chain=chain_of(f"c{number}"), kind="mcp"), limit=1000)
        assert Counter(str((each.arguments or {})["server"]) for each in page.items) == done
        assert {each.result for each in page.items} == {"ok"}


async def test_the_example_runs(server: RunningServer) -> None:
    example = Path(__file__).parents[2] / "examples" / "host_an_mcp_server.py"
    environment = {**os.environ, "CARREL_URL": server.url, "CARREL_TOKEN": server.token or ""}
    run = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", str(example), env=environment, stdout=PIPE, stderr=PIPE
    )
    out, err = await asyncio.wait_for(run.communicate(), 100)
    assert run.returncode == 0, err.decode()
    assert b"2 + 3 = 5" in out and b"denied by mcp(sums:forget)" in out and b"2 + 5 = 7" in out, out
