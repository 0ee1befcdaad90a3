from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from mcp import MCPError
from starlette.applications import Starlette
from starlette.routing import Route

from carrel.client import Client
from carrel.integrations.http import is_wildcard, url_of
from carrel.integrations.mcp.http import FairManager, HttpFront, allowed, application
from carrel.integrations.mcp.server import WorkspaceServer

MODES = ["legacy", "auto"]
ACCEPT = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
HELLO = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
}
LIST = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}


def bearer(token: str) -> dict[str, str]:
    return {**ACCEPT, "authorization": f"Bearer {token}"}


@pytest.fixture
async def http(front: str) -> Any:
    async with httpx.AsyncClient(base_url=front, trust_env=False) as client:
        yield client


@pytest.mark.parametrize("mode", MODES)
async def test_the_path_names_the_context(over_http: Any, context: str, mode: str, admin: Client) -> None:
    async with over_http(context, mode=mode) as client:
        assert f"'{context}'" in client.instructions
        result = await client.call_tool("run_command", {"command": "echo hi"})
        assert result.structured_content["output"] == "hi\n"
    assert admin.find(context).context_id == context


@pytest.mark.parametrize("mode", MODES)
async def test_a_header_names_the_context(over_http: Any, context: str, mode: str) -> None:
    async with over_http(None, mode=mode, headers={"Carrel-Context": context}) as client:
        assert f"'{context}'" in client.instructions
        assert not (await client.call_tool("list_files", {})).is_error


@pytest.mark.parametrize("mode", MODES)
async def test_callers_do_not_meet(
    over_http: Any, admin: Client, governed: str, agent: str, context: str, mode: str
) -> None:
    """Each request is made with the token it came with: the front has no privilege of its own."""
    async with (
        over_http(context, mode=mode) as first,
        over_http(governed, token=agent, mode=mode) as second,
    ):
        writes = [
            client.call_tool("write_file", {"path": "who", "content": name})
            for client, name in [(first, "first"), (second, "second")]
        ]
        assert not any(result.is_error for result in await asyncio.gather(*writes))
        denied = await second.call_tool("run_command", {"command": "curl x"})
        assert denied.structured_content["code"] == "denied_by_policy"
        assert not (await first.call_tool("run_command", {"command": "true"})).is_error
    for name, expected in [(context, b"first"), (governed, b"second")]:
        assert admin.attach(admin.find(name)).files.read("who") == expected
    actors = {record.actor for record in admin.audit.search(context_id=governed) if record.kind == "file"}
    assert f"agent:agent-{governed}" in actors


async def test_no_token_or_a_wrong_one_is_401(http: httpx.AsyncClient, context: str, agent: str, governed: str) -> None:
    for headers in (
        ACCEPT,
        {**ACCEPT, "authorization": "Basic x"},
        {**ACCEPT, "authorization": "Bearer"},
        bearer("a b"),
    ):
        answer = await http.post(f"/{context}/mcp", json=HELLO, headers=headers)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, 'Bearer realm="carrel"')
        assert answer.json()["code"] == "unauthorized"
    wrong = await http.post(f"/{context}/mcp", json=HELLO, headers=bearer("carrel_nonesuch"))
    assert wrong.status_code == 401 and "www-authenticate" in wrong.headers
    out_of_reach = await http.post(f"/{context}/mcp", json=HELLO, headers=bearer(agent))
    assert out_of_reach.status_code == 403 and out_of_reach.json()["code"] == "denied_by_policy"
    assert (await http.post(f"/{governed}/mcp", json=HELLO, headers=bearer(agent))).status_code == 200
    for method in ("GET", "DELETE"):
        assert (await http.request(method, f"/{context}/mcp", headers=ACCEPT)).status_code == 401


async def test_the_context_is_named_once_and_well(http: httpx.AsyncClient, ground: Any) -> None:
    known = bearer(ground.token)
    for path, more in [
        ("/mcp", {}),
        ("/a/mcp", {"carrel-context": "b"}),
        ("/mcp", {"carrel-context": "../etc"}),
        ("/%20x/mcp", {}),
        ("/mcp", {"carrel-context": "x" * 129}),
    ]:
        answer = await http.post(path, json=HELLO, headers={**known, **more})
        assert (answer.status_code, answer.json()["field"]) == (400, "Carrel-Context"), (path, more)
    assert (await http.post("/a/b/mcp", json=HELLO, headers=known)).status_code == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 421),
        ({"host": "127.0.0.1.evil.example:80"}, 421),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost.evil.example"}, 403),
    ],
)
async def test_pages_of_other_sites_are_refused(
    http: httpx.AsyncClient, ground: Any, context: str, headers: dict[str, str], status: int
) -> None:
    answer = await http.post(f"/{context}/mcp", json=HELLO, headers={**bearer(ground.token), **headers})
    assert answer.status_code == status
    own = await http.post(
        f"/{context}/mcp", json=HELLO, headers={**bearer(ground.token), "origin": "http://localhost:3000"}
    )
    assert own.status_code == 200


async def test_a_session_is_for_who_opened_it(
    http: httpx.AsyncClient, ground: Any, context: str, governed: str, agent: str
) -> None:
    opened = await http.post(f"/{governed}/mcp", json=HELLO, headers=bearer(agent))
    session = {"mcp-session-id": opened.headers["mcp-session-id"]}
    own = await http.post(f"/{governed}/mcp", json=LIST, headers={**bearer(agent), **session})
    assert own.status_code == 200
    for path, token in [(f"/{governed}/mcp", ground.token), (f"/{context}/mcp", ground.token)]:
        stolen = await http.post(path, json=LIST, headers={**bearer(token), **session})
        assert stolen.status_code == 404


async def test_a_revoked_token_does_nothing_more(over_http: Any, admin: Client, context: str) -> None:
    made = admin.tokens.create("short-lived", kind="agent", scopes=["operate"], contexts=[context])
    async with over_http(context, token=made.token) as client:
        assert not (await client.call_tool("list_files", {})).is_error
        admin.tokens.revoke(made.id)
        result = await client.call_tool("list_files", {})
        assert result.is_error and result.structured_content["code"] == "unauthorized"


async def test_a_token_that_may_only_read_only_reads(over_http: Any, admin: Client, context: str) -> None:
    admin.sandbox(context)
    made = admin.tokens.create("reader", kind="agent", scopes=["read"], contexts=[context])
    async with over_http(context, token=made.token) as client:
        result = await client.call_tool("run_command", {"command": "true"})
        assert result.is_error and result.structured_content["code"] == "denied_by_policy"
    admin.tokens.revoke(made.id)


async def test_too_much_is_refused(http: httpx.AsyncClient, ground: Any, context: str) -> None:
    body = json.dumps({**LIST, "params": {"cursor": "x" * (5 * 1024 * 1024)}})
    answer = await http.post(f"/{context}/mcp", content=body, headers=bearer(ground.token))
    assert answer.status_code == 413


async def test_a_wrong_client_is_told_at_once(over_http: Any, context: str) -> None:
    with pytest.raises((MCPError, BaseExceptionGroup)):
        async with over_http(context, token="carrel_wrong", mode="legacy"):
            pass


async def test_who_names_no_context_gets_that_of_the_server(ground: Any, context: str) -> None:
    app = application(WorkspaceServer(url=ground.url), context_id=context)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http,
    ):
        answer = await http.post("/mcp", json=HELLO, headers=bearer(ground.token))
        assert answer.status_code == 200 and f"'{context}'" in answer.text


async def test_without_a_server_it_is_503(ground: Any) -> None:
    app = application(WorkspaceServer(url="http://127.0.0.1:9"))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http,
    ):
        answer = await http.post("/c/mcp", json=HELLO, headers=bearer(ground.token))
        assert (answer.status_code, answer.json()["code"]) == (503, "server_unreachable")


def test_addresses() -> None:
    assert is_wildcard("0.0.0.0") and is_wildcard("::") and is_wildcard("")
    assert not is_wildcard("127.0.0.1") and not is_wildcard("example.org")
    assert url_of("0.0.0.0", 1) == "http://127.0.0.1:1" and url_of("::1", 2) == "http://[::1]:2"
    hosts = allowed(["tools.example.org"], "0.0.0.0").allowed_hosts
    assert "tools.example.org" in hosts and "127.0.0.1:*" in hosts and "0.0.0.0:*" not in hosts
    assert "10.0.0.5:*" in allowed([], "10.0.0.5").allowed_hosts
    assert "https://tools.example.org" in allowed(["tools.example.org"], "::").allowed_origins


async def test_one_token_cannot_take_all_sessions(ground: Any, context: str, governed: str, agent: str) -> None:
    workspaces = WorkspaceServer(url=ground.url)
    manager = FairManager(workspaces.server, max_sessions=8)
    front = HttpFront(workspaces, manager, allowed([], "127.0.0.1"), None)
    app = Starlette(routes=[Route("/{context}/mcp", endpoint=front)])
    transport = httpx.ASGITransport(app)
    async with manager.run(), httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:

        async def opened(token: str, *contexts: str) -> list[str]:
            answers = [await http.post(f"/{name}/mcp", json=HELLO, headers=bearer(token)) for name in contexts]
            assert {each.status_code for each in answers} <= {200, 503}
            return [each.headers["mcp-session-id"] for each in answers if each.status_code == 200]

        # In whatever contexts, and with whatever token of the same: half of all.
        greedy = await opened(ground.token, *[context, f"{context}-other"] * 5)
        assert len(greedy) == 4
        assert len(await opened(agent, *[governed] * 5)) == 2
        session = {"mcp-session-id": greedy[0]}
        kept = await http.post(f"/{context}/mcp", json=LIST, headers={**bearer(ground.token), **session})
        assert kept.status_code == 200
        for name in greedy[::2]:
            ended = await http.delete(f"/{context}/mcp", headers={**bearer(ground.token), "mcp-session-id": name})
            assert ended.status_code == 200
        assert len(await opened(ground.token, *[context] * 5)) == 1, "two are back, and as many are left for others"
