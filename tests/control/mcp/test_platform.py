"""Servers that the operator runs outside: a real one on loopback."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from mcp import types
from mcp.server.lowlevel.server import Server
from starlette.types import ASGIApp, Receive, Scope, Send
from tests.support.calls import ADMIN

from carrel.config import Settings
from carrel.control.mcp.platform import read_platform
from carrel.control.plane import ControlPlane
from carrel.errors import Conflict, Denied, InvalidRequest, McpServerFailed, NotFound
from carrel.models import McpRequest, McpServerRequest, PolicyDocuments, SandboxRequest

seen: list[str] = []


def outside() -> ASGIApp:
    async def list_tools(_context: Any, _params: Any) -> types.ListToolsResult:
        tools = [types.Tool(name=name, input_schema={"type": "object"}) for name in ("search", "slow")]
        return types.ListToolsResult(tools=tools)

    async def call_tool(_context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        if params.name == "slow":
            await asyncio.sleep(30)
        text = f"found {(params.arguments or {}).get('q')}"
        return types.CallToolResult(content=[types.TextContent(type="text", text=text)])

    app = Server("outside", version="1", on_list_tools=list_tools, on_call_tool=call_tool).streamable_http_app()

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            seen.append(dict(scope["headers"]).get(b"authorization", b"").decode())
        await app(scope, receive, send)

    return guarded


@asynccontextmanager
async def served() -> AsyncIterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(outside(), log_config=None, timeout_graceful_shutdown=1))
    server.capture_signals = nullcontext  # type: ignore[assignment,method-assign]
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task
        listener.close()


@pytest.fixture
async def port() -> AsyncIterator[int]:
    seen.clear()
    async with served() as port:
        yield port


@pytest.fixture
async def plane(settings: Settings, port: int, tmp_path: Path) -> AsyncIterator[ControlPlane]:
    secret = tmp_path / "token"
    secret.write_text("Bearer from-a-file\n")
    servers = [
        {"name": "web", "url": f"http://127.0.0.1:{port}/mcp", "headers": {"Authorization": {"file": str(secret)}}},
        {"name": "gone", "url": "http://127.0.0.1:9/mcp"},
    ]
    file = tmp_path / "platform.json"
    file.write_text(json.dumps(servers))
    changed = settings.mcp.model_copy(update={"platform_file": str(file)})
    plane = await ControlPlane.open(settings.model_copy(update={"mcp": changed}))
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    yield plane
    await plane.close()


async def test_by_the_same_door(plane: ControlPlane) -> None:
    found = await plane.mcp.catalogue(ADMIN, "c", "web")
    assert [each.qualified for each in found.tools] == ["web:search", "web:slow"]
    told = await plane.mcp.request(ADMIN, "c", "web", McpRequest(tool="search", arguments={"q": "x"}))
    assert told.text == "found x" and set(seen) == {"Bearer from-a-file"}
    slow = await plane.mcp.request(ADMIN, "c", "web", McpRequest(tool="slow", timeout=0.5))
    assert slow.timed_out
    listed = {each.name: each for each in (await plane.mcp.list(ADMIN, "c")).items}
    assert listed["web"].origin == "platform" and listed["web"].tools == 2
    assert (await plane.mcp.get(ADMIN, "c", "web")).origin == "platform"
    rules = {"permissions": {"allow": ["mcp(web:search)"], "deny": ["mcp(web:slow)"]}}
    await plane.policy_changes.put("c", PolicyDocuments(settings=rules), "ann")
    assert (await plane.mcp.request(ADMIN, "c", "web", McpRequest(tool="search"))).text == "found None"
    with pytest.raises(Denied):
        await plane.mcp.request(ADMIN, "c", "web", McpRequest(tool="slow"))
    text = plane.metrics.render()[0].decode()
    assert 'carrel_mcp_call_seconds_count{origin="platform",outcome="ok"} 2.0' in text


async def test_no_caller_changes_it(plane: ControlPlane) -> None:
    with pytest.raises(Conflict):
        await plane.mcp.add(ADMIN, "c", "web", McpServerRequest(command=["x"]))
    for act in (
        plane.mcp.remove(ADMIN, "c", "web"),
        plane.mcp.stop(ADMIN, "c", "web"),
        plane.mcp.start(ADMIN, "c", "web"),
    ):
        with pytest.raises(NotFound):
            await act


async def test_one_that_cannot_be_reached_is_told(plane: ControlPlane) -> None:
    with pytest.raises(McpServerFailed, match=r"cannot be reached|refused to introduce itself"):
        await plane.mcp.request(ADMIN, "c", "gone", McpRequest(tool="x"))
    found = await plane.mcp.refresh(ADMIN, "c", "gone")
    assert found.error is not None and found.tools == []
    assert (await plane.mcp.refresh(ADMIN, "c", "web")).error is None, "others go on"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '[{"name": "a b", "url": "http://x/mcp"}]',
        '[{"name": "a", "url": "ftp://x"}]',
        '[{"name": "a", "url": "http://x"}, {"name": "a", "url": "http://y"}]',
        '[{"name": "a", "url": "http://x", "headers": {"A": {}}}]',
        '[{"name": "a", "url": "http://x", "headers": {"A": {"env": "CARREL_NOT_SET_ANYWHERE"}}}]',
        '[{"name": "a", "url": "http://x", "headers": {"A": {"file": "/nowhere/at/all"}}}]',
        '[{"name": "a", "url": "http://x", "headers": {"A": "two\\nlines"}}]',
        '[{"name": "a", "url": "http://x", "hedaers": {}}]',
    ],
)
def test_what_the_file_cannot_say(tmp_path: Path, text: str) -> None:
    file = tmp_path / "platform.json"
    file.write_text(text)
    with pytest.raises(InvalidRequest) as caught:
        read_platform(str(file))
    assert caught.value.field == "mcp.platform_file"


def test_without_a_file_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_platform(None).names() == []
    with pytest.raises(InvalidRequest):
        read_platform(str(tmp_path / "absent"))
    monkeypatch.setenv("PLATFORM_TOKEN", "Bearer x")
    file = tmp_path / "platform.json"
    file.write_text('[{"name": "a", "url": "http://x", "headers": {"A": {"env": "PLATFORM_TOKEN"}}}]')
    found = read_platform(str(file))
    assert found.names() == ["a"] and "a" in found and found.get("a").name == "a"
    with pytest.raises(NotFound):
        found.get("b")
