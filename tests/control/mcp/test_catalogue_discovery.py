"""Servers that lie, hang, flood or die while they are asked what they offer; and what is left of asking: nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
from tests.support.calls import ADMIN
from tests.support.mcp_hosted import GOOD, HOSTILE

from carrel.config import Settings, load
from carrel.control.operations.caller import Caller
from carrel.control.plane import ControlPlane
from carrel.errors import NotFound
from carrel.identity import Identity, OwnerKind, Scope
from carrel.models import (
    CommandRequest,
    McpCatalogue,
    McpRequest,
    McpServerRequest,
    PolicyDocuments,
    SandboxRequest,
    State,
)
from carrel.models.files import ListRequest
from carrel.models.operations import LIST_FILES

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
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    await plane.operations.write_file(ADMIN, "c", "good.py", GOOD.encode())
    await plane.operations.write_file(ADMIN, "c", "hostile.py", HOSTILE.encode())
    yield "c"
    left = [info for info in (await plane.sessions.page()).items if info.ephemeral]
    assert not left, "a sandbox that asked was left"
    assert [name for name in plane.driver.snapshots() if name.startswith("mcp-")] == []


async def added(plane: ControlPlane, mode: str) -> McpCatalogue:
    await plane.mcp.add(ADMIN, "c", mode, McpServerRequest(command=["python3", "hostile.py", mode]))
    return await plane.mcp.catalogue(ADMIN, "c", mode)


async def test_what_is_wrong_is_told_and_others_go_on(plane: ControlPlane, box: str) -> None:
    await plane.mcp.add(ADMIN, "c", "good", McpServerRequest(command=["python3", "good.py"]))
    usual = plane._mcp_discovery._start_s

    async def one(mode: str) -> None:
        plane._mcp_discovery._start_s = 1.0 if mode == "silent" else usual
        found = await added(plane, mode)
        assert found.error is not None and any(part in found.error for part in NAMED[mode].split("|")), (mode, found)
        assert found.tools == [] and not found.current

    for mode in NAMED:
        await one(mode)
        told = await plane.mcp.request(ADMIN, "c", "good", McpRequest(tool="echo", arguments={"text": mode}))
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
    told = await plane.mcp.request(ADMIN, "c", mode, McpRequest(tool="echo"))
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
    await plane.operations.write_file(ADMIN, "c", "own.py", code.encode())
    await plane.mcp.add(ADMIN, "c", "own", McpServerRequest(command=["python3", "own.py"]))
    found = await plane.mcp.catalogue(ADMIN, "c", "own")
    assert [each.description for each in found.tools] == ["[secret:KEY]"], found
    listing = await plane.operations.forward(ADMIN, LIST_FILES, "c", ListRequest())
    assert "left.txt" not in {each.path for each in listing.items}


async def test_no_secret_is_kept_in_what_it_offers(plane: ControlPlane, box: str) -> None:
    """A fork has the catalogue and not the secrets; and a secret that was deleted is not known any more."""
    await plane.secrets.put("c", "KEY", b"very-secret-value")
    await plane.operations.write_file(
        ADMIN, "c", "good.py", GOOD.replace('"says it again"', 'open("/run/secrets/KEY").read()').encode()
    )
    await plane.mcp.add(ADMIN, "c", "good", McpServerRequest(command=["python3", "good.py"]))
    await plane.snapshots.fork(ADMIN, "c", "twin")
    await plane.operations.stop(ADMIN, "c")
    await plane.secrets.delete("c", "KEY")
    await plane.secret_values.forget_former()
    for context in ("c", "twin"):
        found = await plane.mcp.catalogue(ADMIN, context, "good")
        assert found.tools[0].description == "[secret:KEY]", context


async def test_nobody_else_works_where_carrel_asks(plane: ControlPlane, box: str) -> None:
    """It has the secrets of the context: whoever reached it there would not be held by the rules of the context."""
    rules = {"permissions": {"allow": ["shell(python3:*)"], "deny": ["shell(date:*)"]}}
    await plane.policy_changes.put("c", PolicyDocuments(settings=rules, restart=True), "ann")
    plane._mcp_discovery._start_s = 5.0
    command = ["python3", "hostile.py", "silent"]
    asking = asyncio.ensure_future(plane.mcp.add(ADMIN, "c", "silent", McpServerRequest(command=command)))
    while not (found := [each for each in plane.sessions.live() if each.record.acts_for is not None]):
        await asyncio.sleep(0.01)
    own = found[0].record.id
    caller = Caller(Identity("agent:a", OwnerKind.AGENT, frozenset({Scope.OPERATE})))
    with pytest.raises(NotFound, match="carrel itself"):
        await plane.operations.run_command(caller, own, CommandRequest(command="ls /run/secrets"))
    with pytest.raises(NotFound, match="carrel itself"):
        await plane.operations.forward(caller, LIST_FILES, own, ListRequest())
    with pytest.raises(NotFound, match="carrel itself"):
        await plane.operations.write_file(caller, own, "x", b"x")
    await asking


async def test_those_who_hang_keep_no_other_context_waiting(plane: ControlPlane, box: str) -> None:
    """However many servers of one context are asked, it takes one of the few places."""
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="d"))
    await plane.operations.write_file(ADMIN, "d", "good.py", GOOD.encode())
    command = ["python3", "hostile.py", "silent"]
    waiting = [
        asyncio.ensure_future(plane.mcp.add(ADMIN, "c", f"silent-{number}", McpServerRequest(command=command)))
        for number in range(5)
    ]
    while not [each for each in plane.sessions.live() if each.record.acts_for == "c"]:
        await asyncio.sleep(0.01)
    info = await plane.mcp.add(ADMIN, "d", "good", McpServerRequest(command=["python3", "good.py"]))
    assert info.tools == 9 and not any(each.done() for each in waiting)
    for number in range(5):
        await plane.mcp.remove(ADMIN, "c", f"silent-{number}")
    plane._mcp_discovery._start_s = 0.1
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(each, NotFound) for each in found), "what was removed meanwhile is not asked"


async def test_one_looks_however_many_ask(plane: ControlPlane, box: str) -> None:
    await plane.mcp.add(ADMIN, "c", "good", McpServerRequest(command=["python3", "good.py"]))
    started = 0
    before = plane.sessions.start_own

    async def counted(*given: object) -> object:
        nonlocal started
        started += 1
        return await before(*given)  # type: ignore[arg-type]

    plane.sessions.start_own = counted  # type: ignore[assignment,method-assign]
    found = await asyncio.gather(*(plane.mcp.refresh(ADMIN, "c", "good") for _ in range(8)))
    assert started == 1 and {len(each.tools) for each in found} == {9}


async def test_of_a_stopped_context_and_reading_starts_nothing(plane: ControlPlane, box: str) -> None:
    await plane.mcp.add(ADMIN, "c", "good", McpServerRequest(command=["python3", "good.py"]))
    await plane.operations.stop(ADMIN, "c")
    assert len((await plane.mcp.catalogue(ADMIN, "c", "good")).tools) == 9
    assert [each.state for each in (await plane.mcp.list(ADMIN, "c")).items] == ["stopped"]
    assert (await plane.sessions.get("c")).state is State.STOPPED and not plane.sessions.live()
    assert (await plane.mcp.refresh(ADMIN, "c", "good")).current
    assert (await plane.sessions.get("c")).state is State.STOPPED, "it was asked in a sandbox of its own"


async def test_under_the_policy_of_the_context(plane: ControlPlane, box: str) -> None:
    """What the policy masks is masked there too."""
    rules = {"permissions": {"allow": ["shell(python3:*)"], "deny": ["file(read:${WORKSPACE}/good.py)"]}}
    await plane.policy_changes.put("c", PolicyDocuments(settings=rules, restart=True), "ann")
    await plane.mcp.add(ADMIN, "c", "good", McpServerRequest(command=["python3", "good.py"]))
    found = await plane.mcp.catalogue(ADMIN, "c", "good")
    assert found.tools == [] and found.error is not None


@pytest.mark.parametrize("step", ["snapshot", "fork"])
async def test_a_slow_disk_leaves_nothing_when_the_time_is_up(plane: ControlPlane, box: str, step: str) -> None:
    begun, go_on, done = threading.Event(), threading.Event(), threading.Event()
    before = getattr(plane.driver, step)

    def slow(*given: object) -> object:
        begun.set()
        go_on.wait(30)
        try:
            return before(*given)
        finally:
            done.set()

    setattr(plane.driver, step, slow)
    adding = asyncio.ensure_future(plane.mcp.add(ADMIN, "c", "good", McpServerRequest(command=["python3", "good.py"])))
    await asyncio.to_thread(begun.wait, 30)
    (looking,) = plane._mcp_discovery._running.values()
    looking.cancel()
    for _ in range(100):  # whoever does not wait for it would tidy up now
        await asyncio.sleep(0.01)
    go_on.set()
    await asyncio.gather(adding, return_exceptions=True)
    await asyncio.to_thread(done.wait, 30)
    assert await asyncio.to_thread(plane.driver.volumes) == ["ctx-c"]


async def test_what_a_killed_server_left_is_removed(plane: ControlPlane, box: str) -> None:
    await asyncio.to_thread(plane.driver.snapshot, "ctx-c", "mcp-left")
    await plane._mcp_discovery.open()
    assert "mcp-left" not in plane.driver.snapshots()
