from __future__ import annotations

import asyncio

import pytest

from carrel.control import mcp_wire
from carrel.control.live import LiveSandbox
from carrel.control.mcp_links import McpLinks
from carrel.control.plane import ControlPlane
from carrel.errors import McpServerFailed
from carrel.models import SandboxRequest
from mcp_hosted import GOOD


def declaration(generation: str = "1") -> dict[str, object]:
    command = ["python3", "good.py"]
    return {"command": command, "cwd": None, "variables": {}, "environment": None, "generation": generation}


@pytest.fixture
async def box(plane: ControlPlane) -> LiveSandbox:
    await plane.sessions.deploy_or_resume(SandboxRequest(context_id="c"))
    await plane.operations.write_file("c", "good.py", GOOD.encode())
    return await plane.sessions.find("c")


async def test_one_conversation_however_many_ask(box: LiveSandbox) -> None:
    links = McpLinks(20.0)
    found = await asyncio.gather(*(links.open(box, "good", declaration()) for _ in range(5)))
    assert len({id(each) for each in found}) == 1 and links.current(box, "good", "1") is found[0]
    assert links.current(box, "good", "2") is None
    other = await links.open(box, "good", declaration("2"))
    assert other is not found[0] and not found[0].alive
    await links.stop(box, "good")
    assert not other.alive and (await mcp_wire.states(box.connection))["good"].state == "stopped"
    await links.open(box, "good", declaration("2"))
    await links.stop(box, "good", forget=True)
    assert await mcp_wire.states(box.connection) == {}
    await links.close()


async def test_a_process_that_is_of_no_use_is_ended(box: LiveSandbox) -> None:
    links = McpLinks(20.0)
    talk = await links.open(box, "good", declaration())
    async with links.watching(box, "good", talk):
        await talk.close()
    assert (await mcp_wire.states(box.connection))["good"].state == "stopped"
    assert links.current(box, "good", "1") is None
    with pytest.raises(McpServerFailed):
        await links.open(box, "good", {**declaration("3"), "command": ["false"]})
    await links.close()


async def test_they_end_with_the_sandbox_and_with_the_server(box: LiveSandbox) -> None:
    links = McpLinks(20.0)
    talk = await links.open(box, "good", declaration())
    links.ended(box)
    await links.close()
    assert not talk.alive
    talk = await links.open(box, "good", declaration())
    await links.close()
    assert not talk.alive
