from __future__ import annotations

import asyncio

import pytest
from tests.support.calls import ADMIN
from tests.support.mcp_hosted import GOOD

from carrel.control.mcp import links as mcp_links
from carrel.control.mcp.links import McpLinks
from carrel.control.plane import ControlPlane
from carrel.control.sessions.live import LiveSandbox
from carrel.control.supervisor.client import McpProcess, SupervisorClient
from carrel.errors import Conflict, McpServerFailed
from carrel.models import SandboxRequest


def declaration(generation: str = "1") -> dict[str, object]:
    command = ["python3", "good.py"]
    return {"command": command, "cwd": None, "variables": {}, "environment": None, "generation": generation}


async def holds() -> None:
    """Nothing has changed meanwhile."""


@pytest.fixture
async def box(plane: ControlPlane) -> LiveSandbox:
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    await plane.operations.write_file(ADMIN, "c", "good.py", GOOD.encode())
    return await plane.sessions.find("c")


async def test_one_conversation_however_many_ask(box: LiveSandbox) -> None:
    links = McpLinks(20.0)
    found = await asyncio.gather(*(links.open(box, "good", declaration(), holds) for _ in range(5)))
    assert len({id(each) for each in found}) == 1 and links.current(box, "good", "1") is found[0]
    assert links.current(box, "good", "2") is None
    other = await links.open(box, "good", declaration("2"), holds)
    assert other is not found[0] and not found[0].alive
    await links.stop(box, "good")
    assert not other.alive and (await box.connection.mcp_processes())["good"].state == "stopped"
    await links.open(box, "good", declaration("2"), holds)
    await links.stop(box, "good", forget=True)
    assert await box.connection.mcp_processes() == {}
    await links.close()


async def test_a_process_that_is_of_no_use_is_ended(box: LiveSandbox) -> None:
    links = McpLinks(20.0)
    talk = await links.open(box, "good", declaration(), holds)
    async with links.watching(box, "good", talk):
        await talk.close()
    assert (await box.connection.mcp_processes())["good"].state == "stopped"
    assert links.current(box, "good", "1") is None
    with pytest.raises(McpServerFailed):
        await links.open(box, "good", {**declaration("3"), "command": ["false"]}, holds)
    await links.close()


async def test_they_end_with_the_sandbox_and_with_the_server(box: LiveSandbox) -> None:
    links = McpLinks(20.0)
    talk = await links.open(box, "good", declaration(), holds)
    links.ended(box)
    await links.close()
    assert not talk.alive
    talk = await links.open(box, "good", declaration(), holds)
    await links.close()
    assert not talk.alive


async def test_who_waited_while_it_failed_is_told_the_same(box: LiveSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that hangs takes as long as it may, but once, and not once for each who asks."""
    links, begun = McpLinks(1.0), 0
    before = mcp_links.start_conversation

    async def counted(box: LiveSandbox, server: str, declared: dict[str, object], start_s: float) -> object:
        nonlocal begun
        begun += 1
        return await before(box, server, declared, start_s)

    monkeypatch.setattr(mcp_links, "start_conversation", counted)
    silent = {**declaration(), "command": ["sleep", "3600"]}
    found = await asyncio.gather(*(links.open(box, "s", silent, holds) for _ in range(5)), return_exceptions=True)
    assert begun == 1 and {str(each) for each in found} == {str(found[0])} and isinstance(found[0], McpServerFailed)
    assert "did not introduce itself" in str(found[0])
    with pytest.raises(McpServerFailed):
        await links.open(box, "s", silent, holds)
    assert begun == 2, "who comes later tries anew"
    assert (await links.open(box, "s", declaration("2"), holds)).alive and not links._failed
    await links.close()


async def test_what_does_not_hold_any_more_is_not_started(box: LiveSandbox) -> None:
    links = McpLinks(20.0)

    async def changed() -> None:
        raise Conflict("changed")

    with pytest.raises(Conflict):
        await links.open(box, "good", declaration(), changed)
    assert await box.connection.mcp_processes() == {}
    await links.close()


async def test_the_end_of_one_does_not_end_the_next(box: LiveSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever finds a conversation dead ends its process, and never one that was started since."""
    links, looking, go_on = McpLinks(20.0), asyncio.Event(), asyncio.Event()
    before = SupervisorClient.mcp_processes

    async def slow(connection: SupervisorClient) -> dict[str, McpProcess]:
        looking.set()
        await go_on.wait()
        return await before(connection)

    talk = await links.open(box, "good", declaration(), holds)
    monkeypatch.setattr(SupervisorClient, "mcp_processes", slow)

    async def dying() -> None:
        async with links.watching(box, "good", talk):
            await talk.close()

    async with asyncio.TaskGroup() as group:
        group.create_task(dying())
        await looking.wait()
        opening = group.create_task(links.open(box, "good", declaration(), holds))
        for _ in range(200):  # it is not let in, or it has started long before that
            await asyncio.sleep(0.01)
            if opening.done():
                break
        go_on.set()
    assert (await before(box.connection))["good"].state == "running" and opening.result().alive
    await links.close()
