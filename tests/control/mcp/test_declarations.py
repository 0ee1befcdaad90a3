from __future__ import annotations

import shutil

import pytest
from tests.support.calls import ADMIN
from tests.support.environments_ground import sources, stocked
from tests.support.indexes import wheel

from carrel.control.plane import ControlPlane
from carrel.errors import Denied, InvalidRequest
from carrel.models import McpRequest, McpServerRequest, PolicyDocuments, SandboxRequest, TerminateRequest
from carrel.models.files import ListRequest
from carrel.models.operations import LIST_FILES

SERVER = """
import json, sys
def main():
    for line in sys.stdin:
        m = json.loads(line)
        if "id" in m:
            r = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "content": [],
                 "serverInfo": {"name": "n", "version": "1"}, "tools": [{"name": "t", "inputSchema": {"type": "object"}}]}
            print(json.dumps({"jsonrpc": "2.0", "id": m["id"], "result": r}), flush=True)
"""


async def test_python_packages_become_an_environment_that_it_runs_in(plane: ControlPlane) -> None:
    async with stocked() as index:
        index.add(wheel("shelf-server", requires=("plank",)))
        await plane.policy_changes.put("c", PolicyDocuments(sources=sources(index)), "tests")
        await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
        code = SERVER + "\nimport plank\nmain()\n"
        await plane.operations.write_file(ADMIN, "c", "server.py", code.encode())
        wanted = McpServerRequest(command=["python", "server.py"], requirements=["shelf-server"])
        info = await plane.mcp.add(ADMIN, "c", "s", wanted)
        assert info.discovery_error is None and info.environment is not None and info.tools == 1
        assert [each.name for each in (await plane.envs.list(ADMIN, "c")).items] == [info.environment], (
            "held by the context"
        )
        assert not (await plane.mcp.request(ADMIN, "c", "s", McpRequest(tool="t"))).is_error
        await plane.environments.release(ADMIN, info.environment, "c")
        await plane.environments.remove(ADMIN, info.environment)
        await plane.mcp.stop(ADMIN, "c", "s")
        await plane.mcp.start(ADMIN, "c", "s")
        assert not (await plane.mcp.request(ADMIN, "c", "s", McpRequest(tool="t"))).is_error, "it is built again"
        await plane.operations.terminate(ADMIN, "c", TerminateRequest())
        await plane.environments.list(ADMIN)
        await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
        assert not (await plane.mcp.request(ADMIN, "c", "s", McpRequest(tool="t"))).is_error
        held = [each.name for each in (await plane.envs.list(ADMIN, "c")).items]
        assert held == [info.environment], "what it runs in is in use, also after its session began anew"
        with pytest.raises(Denied):
            await plane.mcp.add(ADMIN, "c", "s", wanted.model_copy(update={"requirements": ["blocked-thing"]}))
        with pytest.raises(InvalidRequest):
            await plane.mcp.add(ADMIN, "c", "s", wanted.model_copy(update={"requirements": ["not-there"]}))
        assert (await plane.mcp.get(ADMIN, "c", "s")).generation == info.generation, "what fails changes nothing"


async def test_npm_without_a_way_out_is_told(plane: ControlPlane) -> None:
    if shutil.which("npm") is None:
        pytest.skip("this host has no npm")
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    await plane.operations.write_file(ADMIN, "c", ".mcp/s/.npmrc", b"fetch-retries=0\nregistry=http://127.0.0.1:9/\n")
    wanted = McpServerRequest(command=["x"], npm=["no-such-package"], variables={})
    with pytest.raises(InvalidRequest, match="the npm packages cannot be installed") as caught:
        await plane.mcp.add(ADMIN, "c", "s", wanted)
    assert caught.value.field == "npm" and (await plane.mcp.list(ADMIN, "c")).items == []


async def test_what_npm_installed_is_found_and_goes_with_the_server(plane: ControlPlane) -> None:
    """A package of the workspace itself, as npm links it: no registry is asked."""
    if shutil.which("npm") is None:
        pytest.skip("this host has no npm")
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    place = ".mcp/s/node_modules/.bin/served"
    await plane.operations.write_file(ADMIN, "c", place, b"#!/bin/sh\nexec python3 /workspace/server.py\n", mode="755")
    await plane.operations.write_file(ADMIN, "c", "server.py", (SERVER + "\nmain()\n").encode())
    box = await plane.sessions.find("c")
    plane.mcp._installing._timeout_s = 60.0
    await plane.operations.write_file(ADMIN, "c", ".mcp/s/.npmrc", b"offline=true\n")
    wanted = McpServerRequest(command=["served"])
    found = await plane.mcp._installing.npm(box, "s", wanted)
    assert found == f"/workspace/{place}"
    assert await plane.mcp._installing.npm(box, "s", wanted.model_copy(update={"command": ["./served"]})) is None
    assert await plane.mcp._installing.npm(box, "s", wanted.model_copy(update={"command": ["other"]})) is None
    await plane.operations.write_file(ADMIN, "c", ".mcp/s/node_modules/.bin/sort", b"#!/bin/sh\n", mode="755")
    disguised = wanted.model_copy(update={"command": ["sort"]})
    assert await plane.mcp._installing.npm(box, "s", disguised) is None, "a rule for sort means the sandbox's own"
    await plane.mcp._installing.remove(box, "s")
    await plane.mcp._installing.remove(box, "s")
    assert ".mcp/s" not in {
        each.path for each in (await plane.operations.forward(ADMIN, LIST_FILES, "c", ListRequest(path=".mcp"))).items
    }
