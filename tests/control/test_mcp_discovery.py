"""Servers that lie, hang, flood or die while they are asked what they offer; and what is left of asking: nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from carrel.config import Settings, load
from carrel.control.plane import ControlPlane
from carrel.models import McpCatalogue, McpRequest, McpServerRequest, PolicyDocuments, SandboxRequest, State
from mcp_hosted import GOOD, HOSTILE

NAMED = {
    "exits": "ended by itself with exit code 7",
    "garbage": "prints text that is no MCP message",
    "silent": "did not introduce itself",
    "huge": "longer than 16 MB|of more than 4 MB",
    "floods": "sends more than it was asked for",
    "deep": "nested too deeply",
    "types": "not what the protocol asks for",
    "version": "does not speak a version of MCP",
    "half": "ended by itself|ended with",
}


@pytest.fixture
def settings(data_dir: str) -> Settings:
    flags = {"data_dir": data_dir, "volumes": "directory", "max_sandboxes": 6, "mcp.start_timeout_s": 10.0}
    return load({**flags, "mcp.discovery_timeout_s": 20.0}, environ={})


@pytest.fixture
async def box(plane: ControlPlane) -> AsyncIterator[str]:
    await plane.sessions.deploy_or_resume(SandboxRequest(context_id="c"))
    await plane.operations.write_file("c", "good.py", GOOD.encode())
    await plane.operations.write_file("c", "hostile.py", HOSTILE.encode())
    yield "c"
    left = [info for info in (await plane.sessions.page()).items if info.ephemeral]
    assert not left, "a sandbox that asked was left"
    assert [name for name in plane.driver.snapshots() if name.startswith("mcp-")] == []


async def added(plane: ControlPlane, mode: str) -> McpCatalogue:
    await plane.mcp.add("c", mode, McpServerRequest(command=["python3", "hostile.py", mode]))
    return await plane.mcp.catalogue("c", mode)


async def test_what_is_wrong_is_told_and_others_go_on(plane: ControlPlane, box: str) -> None:
    await plane.mcp.add("c", "good", McpServerRequest(command=["python3", "good.py"]))
    usual = plane._mcp_discovery._start_s

    async def one(mode: str) -> None:
        plane._mcp_discovery._start_s = 1.0 if mode == "silent" else usual
        found = await added(plane, mode)
        assert found.error is not None and any(part in found.error for part in NAMED[mode].split("|")), (mode, found)
        assert found.tools == [] and not found.current

    for mode in NAMED:
        await one(mode)
        told = await plane.mcp.request("c", "good", McpRequest(tool="echo", arguments={"text": mode}))
        assert told.text == mode, "others go on"


async def test_claims_are_bounded_and_belong_to_who_makes_them(plane: ControlPlane, box: str) -> None:
    found = await added(plane, "claims")
    assert found.current and len(found.tools) == 512
    assert {each.qualified for each in found.tools} >= {"claims:echo", "claims:t0"}
    assert all(each.qualified.startswith("claims:") and len(each.name) <= 128 for each in found.tools)
    assert not {"good:echo", "resources/read", "a\nb", "large"} & {each.name for each in found.tools}
    assert found.error is not None and "names are not allowed" in found.error and "listed twice" in found.error
    assert found.server_info == {"name": "hostile ?", "version": "\ufffd"}


@pytest.mark.parametrize("mode", ["asks", "pages", "strangers"])
async def test_what_nobody_asked_for_is_passed_over(plane: ControlPlane, box: str, mode: str) -> None:
    found = await added(plane, mode)
    assert [each.name for each in found.tools] == ["echo"], found
    told = await plane.mcp.request("c", mode, McpRequest(tool="echo"))
    assert told.text == "hello"


async def test_it_sees_a_copy_of_the_workspace(plane: ControlPlane, box: str) -> None:
    """Files and secrets are those of the context; what is written goes with the sandbox."""
    await plane.secrets.put("c", "KEY", b"very-secret-value")
    code = (
        "import json,sys\n"
        "open('left.txt','w').write('x')\n"
        "secret=open('/run/secrets/KEY').read()\n"
        "for line in sys.stdin:\n"
        "    m=json.loads(line)\n"
        "    if 'id' not in m: continue\n"
        "    tools=[{'name':'t','description':secret,'inputSchema':{'type':'object'}}]\n"
        "    r={'protocolVersion':'2025-06-18','capabilities':{'tools':{}},'serverInfo':{'name':'n','version':'1'},"
        "'tools':tools}\n"
        "    print(json.dumps({'jsonrpc':'2.0','id':m['id'],'result':r}),flush=True)\n"
    )
    await plane.operations.write_file("c", "own.py", code.encode())
    await plane.mcp.add("c", "own", McpServerRequest(command=["python3", "own.py"]))
    found = await plane.mcp.catalogue("c", "own")
    assert [each.description for each in found.tools] == ["[secret:KEY]"], found
    listing = await plane.operations.list_files("c")
    assert "left.txt" not in {each.path for each in listing.items}


async def test_one_looks_however_many_ask(plane: ControlPlane, box: str) -> None:
    await plane.mcp.add("c", "good", McpServerRequest(command=["python3", "good.py"]))
    started = 0
    before = plane.sessions.start_own

    async def counted(*given: object) -> object:
        nonlocal started
        started += 1
        return await before(*given)  # type: ignore[arg-type]

    plane.sessions.start_own = counted  # type: ignore[assignment,method-assign]
    found = await asyncio.gather(*(plane.mcp.refresh("c", "good") for _ in range(8)))
    assert started == 1 and {len(each.tools) for each in found} == {9}


async def test_of_a_stopped_context_and_reading_starts_nothing(plane: ControlPlane, box: str) -> None:
    await plane.mcp.add("c", "good", McpServerRequest(command=["python3", "good.py"]))
    await plane.operations.stop("c")
    assert len((await plane.mcp.catalogue("c", "good")).tools) == 9
    assert [each.state for each in (await plane.mcp.list("c")).items] == ["stopped"]
    assert (await plane.sessions.get("c")).state is State.STOPPED and not plane.sessions.live()
    assert (await plane.mcp.refresh("c", "good")).current
    assert (await plane.sessions.get("c")).state is State.STOPPED, "it was asked in a sandbox of its own"


async def test_under_the_policy_of_the_context(plane: ControlPlane, box: str) -> None:
    """What the policy masks is masked there too."""
    rules = {"permissions": {"allow": ["shell(python3:*)"], "deny": ["file(read:${WORKSPACE}/good.py)"]}}
    await plane.put_policy("c", PolicyDocuments(settings=rules, restart=True), "ann")
    await plane.mcp.add("c", "good", McpServerRequest(command=["python3", "good.py"]))
    found = await plane.mcp.catalogue("c", "good")
    assert found.tools == [] and found.error is not None


async def test_what_a_killed_server_left_is_removed(plane: ControlPlane, box: str) -> None:
    await asyncio.to_thread(plane.driver.snapshot, "ctx-c", "mcp-left")
    await plane._mcp_discovery.open()
    assert "mcp-left" not in plane.driver.snapshots()
