"""The supervisor's routes for MCP servers, as the control plane uses them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from tests.support.calls import ADMIN

from carrel.control.mcp.links import Wire, failed, stop_if_running
from carrel.control.plane import ControlPlane
from carrel.control.sessions.live import LiveSandbox
from carrel.errors import McpServerFailed
from carrel.models import SandboxRequest

ECHO = "import sys\nprint('ready', file=sys.stderr, flush=True)\nfor line in sys.stdin: print(line.strip(), flush=True)"


def declaration(*command: str, generation: str = "1") -> dict[str, object]:
    return {"command": list(command), "cwd": None, "variables": {}, "environment": None, "generation": generation}


@pytest.fixture
async def box(plane: ControlPlane) -> LiveSandbox:
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    return await plane.sessions.find("c")


async def first(lines: AsyncIterator[bytes]) -> object:
    return json.loads(await anext(lines))


async def test_lines_in_and_out(box: LiveSandbox) -> None:
    wire = await Wire.open(box.connection, declaration("python3", "-c", ECHO), "echo")
    lines = wire.lines()
    sending = asyncio.ensure_future(wire.send(b'{"a": 1}'))
    assert await first(lines) == {"a": 1}
    await sending
    assert (await box.connection.mcp_processes())["echo"].state == "running"
    again = await Wire.open(box.connection, declaration("python3", "-c", ECHO), "echo")
    others = again.lines()
    sending = asyncio.ensure_future(again.send(b'{"b": 2}'))
    assert await first(others) == {"b": 2}, "another process: nobody knows what was said to the one before"
    await sending
    assert [line async for line in lines] == [] and wire.ended is not None
    with pytest.raises(McpServerFailed):
        await wire.send(b"{}")
    assert (await box.connection.mcp_log("echo", 0, 1000)).text.count("ready") == 2
    await stop_if_running(box.connection, "echo")
    assert [line async for line in others] == [] and again.ended == "was stopped"
    await box.connection.stop_mcp("echo")
    await box.connection.forget_mcp("echo")
    await box.connection.forget_mcp("echo")
    await box.connection.stop_mcp("echo")
    assert await box.connection.mcp_processes() == {}
    wire.close()
    again.close()


async def test_what_cannot_be_started_is_told(box: LiveSandbox) -> None:
    with pytest.raises(McpServerFailed, match="the MCP server 'x' cannot be started: nothing: command not found"):
        await Wire.open(box.connection, declaration("nothing"), "x")
    with pytest.raises(McpServerFailed, match="may start again"):
        await Wire.open(box.connection, declaration("nothing"), "x")
    with pytest.raises(McpServerFailed, match="environment"):
        await Wire.open(box.connection, declaration("true", generation="2") | {"environment": "absent"}, "x")


async def test_one_that_ends_by_itself_waits_its_time(box: LiveSandbox) -> None:
    wire = await Wire.open(box.connection, declaration("sh", "-c", "exit 4"), "x")
    assert [line async for line in wire.lines()] == [] and wire.ended is not None and "4" in wire.ended
    await stop_if_running(box.connection, "x")
    assert (await box.connection.mcp_processes())["x"].state == "backing_off"
    wire.close()


async def test_a_message_that_is_too_long(box: LiveSandbox) -> None:
    code = "print('{\"x\": \"' + 'y' * 5_000_000 + '\"}', flush=True); import time; time.sleep(60)"
    wire = await Wire.open(box.connection, declaration("python3", "-c", code), "x")
    assert [line async for line in wire.lines()] == []
    assert wire.ended == "sent a message of more than 4 MB"
    wire.close()


def test_what_callers_are_told() -> None:
    assert failed("x", "MCP server 'x' fell over").detail == "the MCP server 'x' fell over"
    assert len(failed("x", "y" * 9000).detail) < 1000
