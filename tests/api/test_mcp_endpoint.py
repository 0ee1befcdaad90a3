"""The official MCP client at the URL of a hosted server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import httpx2
import pytest
from mcp import Client, MCPError, types
from mcp.client.streamable_http import streamable_http_client
from tests.support.governed import Known
from tests.support.mcp_hosted import GOOD

from carrel.api.mcp_endpoint import RequestWork
from carrel.server import RunningServer

ACCEPT = {"accept": "application/json, text/event-stream"}


@pytest.fixture
async def place(http: httpx.AsyncClient, box: str) -> str:
    await http.put(f"{box}/files/content?path=good.py", content=GOOD.encode())
    added = await http.put(f"{box}/mcp-servers/good", json={"command": ["python3", "good.py"]})
    assert added.status_code == 200 and added.json()["discovery_error"] is None, added.text
    return str(added.json()["url"])


@asynccontextmanager
async def connected(
    server: RunningServer, place: str, mode: str = "auto", token: str | None = None, able: dict[str, Any] | None = None
) -> AsyncIterator[Client]:
    given = {"authorization": f"Bearer {token or server.token}"}
    async with httpx2.AsyncClient(headers=given, timeout=30) as client:
        transport = streamable_http_client(f"{server.url}{place}", http_client=client)
        async with Client(transport, mode=mode, **(able or {})) as session:  # type: ignore[arg-type]
            yield session


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_with_no_special_code(server: RunningServer, place: str, mode: str) -> None:
    steps: list[float] = []

    async def progress(progress: float, total: float | None, message: str | None) -> None:
        steps.append(progress)

    async with connected(server, place, mode) as client:
        tools = await client.list_tools()
        assert [each.name for each in tools.tools][:2] == ["echo", "whoami"]
        told = await client.call_tool("echo", {"text": "hi"})
        assert told.structured_content == {"text": "hi"} and not told.is_error
        assert (await client.call_tool("fail", {})).is_error
        with pytest.raises(MCPError):
            await client.call_tool("absent", {})
        assert (await client.call_tool("step", {}, progress_callback=progress)).content[0].text == "three steps"  # type: ignore[union-attr]
        async with asyncio.timeout(30):
            while sorted(steps) != [1.0, 2.0, 3.0]:  # the client delivers progress in tasks of their own
                await asyncio.sleep(0.01)
        assert (await client.list_prompts()).prompts[0].name == "greet"
        greeting = await client.get_prompt("greet", {"who": "ann"})
        assert greeting.messages[0].content.text == "greet ann"  # type: ignore[union-attr]
        assert str((await client.list_resources()).resources[0].uri) == "memo://one"
        read = await client.read_resource("memo://one")
        assert read.contents[0].text == "what it holds"  # type: ignore[union-attr]
        assert client.instructions == "be kind"


async def test_lists_wake_nothing_and_a_call_resumes(
    server: RunningServer, http: httpx.AsyncClient, place: str
) -> None:
    assert (await http.post("/v1/sandboxes/box/stop")).status_code == 200
    async with connected(server, place) as client:
        assert len((await client.list_tools()).tools) == 9
        assert (await http.get("/v1/sandboxes/box")).json()["state"] == "stopped"
        assert (await client.call_tool("count", {})).content[0].text == "1"  # type: ignore[union-attr]
    assert (await http.get("/v1/sandboxes/box")).json()["state"] == "running"


async def test_policy_and_approvals(server: RunningServer, http: httpx.AsyncClient, place: str, known: Known) -> None:
    rules = {"permissions": {"allow": ["mcp(good:echo)", "shell(python3:*)"], "deny": ["mcp(good:fail)"]}}
    assert (await http.put("/v1/contexts/box/policy", json={"settings": rules})).status_code == 200
    agent = await known("coder", "agent", "operate")
    token = agent.headers["authorization"].removeprefix("Bearer ")
    async with connected(server, place, token=token) as client:
        denied = await client.call_tool("fail", {})
        assert denied.is_error and json.loads(denied.content[0].text.splitlines()[-1])["rule"] == "mcp(good:fail)"  # type: ignore[union-attr]
        waits = await client.call_tool("count", {})
        assert waits.is_error and waits.structured_content is not None
        approval = waits.structured_content["approval"]
        assert approval in waits.content[0].text  # type: ignore[union-attr]
        decided = await http.post(f"/v1/approvals/{approval}/decide", json={"approve": True})
        assert decided.status_code == 200, decided.text
        assert (await client.call_tool("count", {})).content[0].text == "1"  # type: ignore[union-attr]
        with pytest.raises(MCPError, match="resources/read"):
            await client.read_resource("memo://one")


async def test_a_call_waits_for_a_person(
    server: RunningServer, http: httpx.AsyncClient, place: str, known: Known
) -> None:
    rules = {"permissions": {"allow": ["shell(python3:*)"]}}
    assert (await http.put("/v1/contexts/box/policy", json={"settings": rules})).status_code == 200
    agent = await known("coder", "agent", "operate")
    headers = {"authorization": agent.headers["authorization"], **ACCEPT, "carrel-wait": "60"}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "count", "arguments": {}}}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60) as client:
        asking = asyncio.ensure_future(client.post(place, json=message))
        while not (waiting := (await http.get("/v1/approvals?state=pending")).json()["items"]):
            await asyncio.sleep(0.02)
        assert waiting[0]["kind"] == "mcp"
        await http.post(f"/v1/approvals/{waiting[0]['id']}/decide", json={"approve": True})
        answer = await asking
    assert answer.status_code == 200 and '"text":"1"' in answer.text.replace(" ", "")


async def test_what_is_not_a_message(server: RunningServer, place: str) -> None:
    headers = {"authorization": f"Bearer {server.token}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=30) as client:
        assert (await client.get(place)).status_code == 405
        assert (await client.delete(place)).status_code == 405
        assert (await client.post(place, json={}, headers={"accept": "text/plain"})).status_code == 406
        assert (
            await client.post(place, content=b"{", headers={**ACCEPT, "content-type": "application/json"})
        ).status_code == 400
        large = b'{"x": "' + b"y" * 1_100_000 + b'"}'
        assert (await client.post(place, content=large, headers=ACCEPT)).status_code == 413
        absent = await client.post(place.replace("/good/", "/absent/"), json={}, headers=ACCEPT)
        assert absent.status_code == 404 and absent.json()["code"] == "not_found"
        elsewhere = await client.post(place, json={}, headers={**ACCEPT, "origin": "https://evil.example"})
        assert elsewhere.status_code == 400


async def test_a_client_that_goes_away_breaks_its_call_off(
    server: RunningServer, http: httpx.AsyncClient, place: str
) -> None:
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "hang", "arguments": {}}}
    headers = {"authorization": f"Bearer {server.token}", **ACCEPT}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60) as client:
        asking = asyncio.ensure_future(client.post(place, json=message))
        while (await http.get("/v1/sandboxes/box/mcp-servers/good")).json()["state"] != "running":
            await asyncio.sleep(0.02)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    while True:
        found = (await http.get("/v1/audit?kind=mcp")).json()["items"]
        if found and found[0].get("result") == "cancelled":
            break
        await asyncio.sleep(0.02)


async def test_a_client_that_goes_away_while_a_sandbox_starts_leaves_none(
    server: RunningServer, http: httpx.AsyncClient, place: str
) -> None:
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "count", "arguments": {}}}
    headers = {"authorization": f"Bearer {server.token}", **ACCEPT}

    async def state() -> str:
        return str((await http.get("/v1/sandboxes/box")).json()["state"])

    for _ in range(3):
        assert (await http.post("/v1/sandboxes/box/stop")).status_code == 200
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60) as client:
            asking = asyncio.ensure_future(client.post(place, json=message))
            while await state() == "stopped":
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        while await state() == "creating":
            await asyncio.sleep(0.01)
        again = await http.post("/v1/sandboxes", json={"context_id": "box", "trust": "high"})
        assert again.status_code < 300, again.text


async def test_what_is_broken_off_again_and_again_still_tidies_up() -> None:
    work, tidied = RequestWork(), []

    async def long() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for turn in range(5):
                await asyncio.sleep(0)
                tidied.append(turn)

    async def handler() -> None:
        await work.done(work.begin(long()))

    async with anyio.create_task_group() as group:
        group.start_soon(handler)
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    await work.end()
    assert tidied == list(range(5))


ASKS = r"""
import json, sys

def say(message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)

told = {}
for line in sys.stdin:
    message = json.loads(line)
    if message.get("method") == "initialize":
        told["capabilities"] = message["params"]["capabilities"]
        result = {"protocolVersion": message["params"]["protocolVersion"], "capabilities": {"tools": {}},
                  "serverInfo": {"name": "asks", "version": "1"}}
        say({"id": message["id"], "result": result})
    elif message.get("method") == "tools/list":
        say({"id": message["id"], "result": {"tools": [{"name": "ask", "inputSchema": {"type": "object"}}]}})
    elif message.get("method") == "tools/call":
        form = {"message": "your password?", "requestedSchema": {"type": "object", "properties": {}}}
        say({"id": "e", "method": "elicitation/create", "params": form})
        say({"id": "s", "method": "sampling/createMessage", "params": {"messages": [], "maxTokens": 1}})
        say({"id": "r", "method": "roots/list"})
        for name in "esr":
            answer = json.loads(sys.stdin.readline())
            told[answer["id"]] = answer.get("error", {}).get("code")
        say({"id": message["id"], "result": {"content": [], "structuredContent": told}})
"""


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_what_a_server_asks_reaches_no_client(
    server: RunningServer, http: httpx.AsyncClient, box: str, mode: str
) -> None:
    """The server is told so before it asks, and gets an error when it does: it never waits for an answer."""
    await http.put(f"{box}/files/content?path=asks.py", content=ASKS.encode())
    added = await http.put(f"{box}/mcp-servers/asks", json={"command": ["python3", "asks.py"]})
    reached: list[str] = []

    async def sample(context: object, params: object) -> types.ErrorData:
        reached.append("sampling")
        return types.ErrorData(code=1, message="no")

    async def elicit(context: object, params: object) -> types.ElicitResult:
        reached.append("elicitation")
        return types.ElicitResult(action="accept", content={})

    async def roots(context: object) -> types.ListRootsResult:
        reached.append("roots")
        return types.ListRootsResult(roots=[])

    able = {"sampling_callback": sample, "elicitation_callback": elicit, "list_roots_callback": roots}
    async with connected(server, added.json()["url"], mode, able=able) as client:
        told = await client.call_tool("ask", {})
    assert told.structured_content == {"capabilities": {}, "e": -32600, "s": -32600, "r": -32600}
    assert not reached
