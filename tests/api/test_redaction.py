"""A secret that a caller or an agent writes somewhere is shown nowhere: in no answer, stream, webhook, log or metric."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import httpx
import pytest
from tests.support.governed import Known
from websockets.asyncio.client import connect

from carrel.config import Settings
from carrel.errors import PlatformError
from carrel.server import RunningServer

SECRET = "correct-horse-battery"
SHOWN = "[secret:PASSWORD]"
AT = "/v1/sandboxes/team:a"
POLICY = {
    "permissions": {
        "allow": ["shell(cat:*)", "file(read:${WORKSPACE}/**)", "file(write:${WORKSPACE}/**)"],
        "deny": ["shell(curl:*)", "file(read:${WORKSPACE}/hidden/**)"],
    }
}


@pytest.fixture
async def heard() -> AsyncIterator[tuple[str, list[str]]]:
    """A webhook, and what it was told."""
    bodies: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length:")[2].split()[0])
        bodies.append((await reader.readexactly(length)).decode())
        writer.write(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook", bodies


@pytest.fixture
def settings(settings: Settings, heard: tuple[str, list[str]]) -> Settings:
    approvals = {"webhook": heard[0], "webhook_secret": "k" * 32}
    return Settings.model_validate({**settings.model_dump(), "approvals": approvals})


@pytest.fixture
async def agent(http: httpx.AsyncClient, known: Known) -> httpx.AsyncClient:
    """An agent in a governed sandbox that has a secret. No answer may show it, to nobody."""
    assert (await http.put("/v1/contexts/team:a/policy", json={"settings": POLICY})).status_code == 200
    assert (await http.put("/v1/contexts/team:a/secrets/PASSWORD", json={"value": SECRET})).status_code == 200
    agent = await known("coder", "agent", "operate", namespace="team")
    assert (await agent.post("/v1/sandboxes", json={"context_id": "team:a"})).status_code == 201

    async def judge(answer: httpx.Response) -> None:
        await answer.aread()
        assert SECRET not in answer.text, f"{answer.request.method} {answer.request.url}"

    agent.event_hooks = http.event_hooks = {"response": [*http.event_hooks["response"], judge]}
    return agent


async def test_no_refusal_shows_it(
    agent: httpx.AsyncClient, http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "carrel")
    refusals = [
        await agent.post(f"{AT}/commands", json={"command": f"curl -H {SECRET} x"}),
        await agent.post(f"{AT}/commands", json={"command": f"curl 'x {SECRET}"}),
        await agent.post(f"{AT}/commands", json={"command": f"$({SECRET}) <<{SECRET}"}),
        await agent.post(f"{AT}/commands", json={"command": f"{SECRET} --now"}),
        await agent.post(f"{AT}/commands", json={"command": ["cat"], "cwd": SECRET}),
        await agent.post(f"{AT}/commands", json={"command": ["cat"], SECRET: 1}),
        await agent.post(f"{AT}/commands", json={"command": ["cat"], "env": {SECRET: "x"}}),
        await agent.post(f"{AT}/commands/{SECRET}/signal", json={}),
        await agent.get(f"{AT}/commands/{SECRET}"),
        await agent.get(f"{AT}/files/content", params={"path": f"data/{SECRET}"}),
        await agent.get(f"{AT}/files/content", params={"path": f"hidden/{SECRET}"}),
        await agent.get(f"{AT}/files/content", params={"path": f"../{SECRET}"}),
        await agent.get(f"{AT}/files/stat", params={"path": SECRET, SECRET: "1"}),
        await agent.post(f"{AT}/files/edit", json={"path": SECRET, "old": SECRET, "new": "x"}),
        await agent.post(f"{AT}/tools", json={"tool_name": SECRET, "params": {}}),
        await agent.post(f"{AT}/tools", json={"tool_name": "create_file", "params": {SECRET: 1}}),
        await agent.post(f"{AT}/execute", json={"code": f"curl {SECRET}"}),
        await agent.post(f"{AT}/restore", json={"snapshot_id": SECRET}),
        await agent.get("/v1/filespaces/team:a/content", params={"path": SECRET}),
        await agent.put("/v1/filespaces/team:a/content", params={"path": f"../{SECRET}"}, content=b"x"),
        await http.delete(f"/v1/contexts/team:a/secrets/{SECRET}"),
        await http.put("/v1/contexts/team:a/policy", json={"settings": {SECRET: 1}}),
        await http.put("/v1/contexts/team:a/policy", json={"settings": {"permissions": {"allow": [SECRET]}}}),
    ]
    assert all(answer.is_error for answer in refusals), [str(each.request.url) for each in refusals if each.is_success]
    assert sum(SHOWN in answer.text for answer in refusals) > 5
    assert SHOWN in (await http.get("/v1/audit", params={"limit": 1000})).text
    for path in ("/metrics", "/v1/audit/export", "/v1/approvals"):
        assert (await http.get(path)).status_code == 200
    assert SECRET not in caplog.text


async def test_no_terminal_shows_it(agent: httpx.AsyncClient) -> None:
    body = {"command": "cat", "stdin": f"{SECRET}\n", "interactive": True}
    answer = await agent.post(f"{AT}/commands", json=body)
    assert answer.json()["stdout"].count(SHOWN) == 2, "its echo, and what `cat` wrote"


async def test_no_approval_shows_it(
    agent: httpx.AsyncClient, known: Known, heard: tuple[str, list[str]], server: RunningServer
) -> None:
    asked = {"command": f"{SECRET} --push", "env": {"A": SECRET}}
    handle = (await agent.post(f"{AT}/commands", json=asked)).json()["approval"]
    ann = await known("ann", "person", "approve")
    ann.event_hooks = agent.event_hooks
    assert SHOWN in (await ann.get(f"/v1/approvals/{handle}")).text
    async with (
        httpx.AsyncClient(base_url=server.url, headers=ann.headers) as watcher,
        watcher.stream("GET", "/v1/approvals/watch") as watch,
    ):
        first = await anext(watch.aiter_text())
        assert SHOWN in first and SECRET not in first
    decided = await ann.post(f"/v1/approvals/{handle}/decide", json={"approve": False, "message": f"not {SECRET}"})
    assert decided.json()["message"] == f"not {SHOWN}"
    denied = await agent.post(f"{AT}/commands", json=asked, headers={"carrel-approval": handle})
    assert denied.json()["detail"] == f"not {SHOWN}"
    async with asyncio.timeout(20):
        while not heard[1]:
            await asyncio.sleep(0.02)
    assert SHOWN in heard[1][0] and SECRET not in heard[1][0]


async def test_what_is_told_of_commands(agent: httpx.AsyncClient, http: httpx.AsyncClient) -> None:
    started = await agent.post(f"{AT}/commands/start", json={"command": ["cat", SECRET]})
    assert started.json()["command"] == ["cat", SHOWN]
    id = started.json()["id"]
    for path in (f"commands/{id}", "commands", f"commands/{id}/output", f"commands/{id}/result"):
        assert (await agent.get(f"{AT}/{path}")).status_code == 200
    streamed = await agent.post(f"{AT}/commands/stream", json={"command": f"cat {SECRET}"})
    assert f'"cat {SHOWN}"' in streamed.text
    await agent.post(f"{AT}/terminate", json={"reason": SECRET})
    assert (await http.get("/v1/sandboxes", params={"state": "terminated"})).json()["items"]


async def test_a_terminal(agent: httpx.AsyncClient, server: RunningServer) -> None:
    url = f"{server.url.replace('http', 'ws')}{AT}/terminals?command=cat"
    headers = {"authorization": agent.headers["authorization"]}
    async with connect(url, additional_headers=headers, proxy=None) as socket, asyncio.timeout(20):
        await socket.send(f"{SECRET}\n".encode())
        seen = b""
        while SHOWN.encode() not in seen:
            seen += bytes(await socket.recv())  # type: ignore[arg-type]
        assert SECRET.encode() not in seen


async def test_what_nobody_foresaw_is_logged_without_it(
    agent: httpx.AsyncClient, server: RunningServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object, **__: object) -> None:
        raise RuntimeError(f"what now: {SECRET}")

    monkeypatch.setattr(server.plane.operations, "forward", broken)
    answer = await agent.get(f"{AT}/files/stat", params={"path": "x"})
    assert answer.status_code == 500 and answer.json()["code"] == "platform_error"
    async with asyncio.timeout(20):
        while f"RuntimeError: what now: {SHOWN}" not in caplog.text:
            await asyncio.sleep(0.02)
    assert SECRET not in caplog.text


async def test_what_a_sync_says_of_a_file(
    agent: httpx.AsyncClient, server: RunningServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object, **__: object) -> None:
        raise PlatformError(f"'{SECRET}' cannot be written")

    caplog.set_level(logging.INFO, "carrel")
    monkeypatch.setattr(server.plane.attachments.filespace, "_attempt", broken)
    answer = await agent.post(f"{AT}/sync", json={"direction": "pull"})
    assert answer.json()["detail"] == f"'{SHOWN}' cannot be written"
    assert SHOWN in (await agent.get(AT)).json()["notice"]
    assert SECRET not in caplog.text


async def test_name_of_a_request_is_redacted_in_the_audit_log(
    agent: httpx.AsyncClient, http: httpx.AsyncClient
) -> None:
    named = {"x-request-id": f"run-{SECRET}"}
    for command in ("cat /dev/null", "curl x"):
        await agent.post(f"{AT}/commands", json={"command": command}, headers=named)
    shaped = {"x-request-id": "carrel_" + "aB3-" * 11}
    body = {"name": "x", "kind": "agent", "scopes": ["read"]}
    assert (await http.post("/v1/tokens", json=body, headers=shaped)).status_code == 201
    found = (await http.get("/v1/audit", params={"limit": 100})).text
    assert SECRET not in found and f"run-{SHOWN}" in found
    assert shaped["x-request-id"] not in found
