from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from tests.support.governed import POLICY, Known
from tests.support.refusals import refused

from carrel.config import Settings
from carrel.server import RunningServer, running

TOUCH = {"command": "echo x >> made; touch made"}


async def asked(agent: httpx.AsyncClient, box: str, command: dict[str, str] = TOUCH) -> dict[str, Any]:
    problem = refused(await agent.post(f"{box}/commands", json=command), 403, None, "approval_needed")
    assert problem["retry"] is True and problem["approval"].startswith("apr-")
    return problem


async def records(http: httpx.AsyncClient, **wanted: str) -> list[dict[str, Any]]:
    answer = await http.get("/v1/audit", params={"context_id": "team:a", **wanted})
    return list(answer.json()["items"])


async def test_asked_approved_and_run_once(http: httpx.AsyncClient, known: Known, governed: str) -> None:
    agent = await known("coder", "agent", "operate", namespace="team")
    ann = await known("ann", "person", "approve")
    handle = (await asked(agent, governed))["approval"]
    assert (await asked(agent, governed))["approval"] == handle, "the same request is asked for once"
    refused(await agent.post(f"/v1/approvals/{handle}/decide", json={"approve": True}), 403, None)
    refused(await agent.post("/v1/approvals/decide", json={"ids": [handle], "decision": {"approve": True}}), 403, None)
    [waiting] = (await ann.get("/v1/approvals", params={"state": "pending"})).json()["items"]
    assert (waiting["id"], waiting["requested_by"], waiting["context_id"]) == (handle, "agent:coder", "team:a")

    decided = await ann.post(f"/v1/approvals/{handle}/decide", json={"approve": True, "message": "fine"})
    assert decided.json()["decided_by"] == "person:ann"
    refused(await ann.post(f"/v1/approvals/{handle}/decide", json={"approve": False}), 409, "id")
    assert (await agent.get(f"/v1/approvals/{handle}")).json()["state"] == "approved"

    given = {"carrel-approval": handle, "x-request-id": "req-7"}
    answers = await asyncio.gather(*(agent.post(f"{governed}/commands", json=TOUCH, headers=given) for _ in range(4)))
    assert sorted(answer.status_code for answer in answers) == [200, 409, 409, 409]
    assert {answer.headers["x-request-id"] for answer in answers} == {"req-7"}
    made = await agent.get(f"{governed}/files/content", params={"path": "made"})
    assert made.text == "x\n"
    refused(await agent.post(f"{governed}/commands", json={"command": "rm made"}, headers=given), 409, "approval")

    async def done() -> list[dict[str, Any]]:
        return [each for each in await records(http, name="run_command") if each["result"] == "ok"]

    while not (ran := await done()):
        await asyncio.sleep(0.02)
    [run] = ran
    assert (run["decision"], run["approval"], run["actor"], run["request"]) == ("ask", handle, "agent:coder", "req-7")
    [decision] = [each for each in await records(http, name="decide_approval") if each["actor"] == "person:ann"][-1:]
    assert (decision["arguments"]["approval"], decision["result"]) == (handle, "ok")
    assert [each["decision"] for each in await records(http, result="approval_needed")] == ["ask", "ask"]


async def test_denied_with_a_message(known: Known, governed: str) -> None:
    agent, ann = await known("coder", "agent", "operate"), await known("ann", "person", "approve")
    handle = (await asked(agent, governed))["approval"]
    await ann.post(f"/v1/approvals/{handle}/decide", json={"approve": False, "message": "use the other file"})
    answer = await agent.post(f"{governed}/commands", json=TOUCH, headers={"carrel-approval": handle})
    problem = refused(answer, 403, None, "denied_by_policy")
    assert problem["detail"] == "use the other file" and problem["approval"] == handle


async def test_for_the_context_and_as_a_rule(http: httpx.AsyncClient, known: Known, governed: str) -> None:
    agent, ann = await known("coder", "agent", "operate"), await known("ann", "person", "approve")
    one, two = (await asked(agent, governed))["approval"], (await asked(agent, governed, {"command": "id"}))["approval"]
    missing = await ann.post(f"/v1/approvals/{two}/decide", json={"approve": True, "scope": "rule"})
    refused(missing, 400, "rule")
    batch = {"ids": [one, two, "apr-none"], "decision": {"approve": True, "scope": "context"}}
    result = (await ann.post("/v1/approvals/decide", json=batch)).json()
    assert {each["id"] for each in result["decided"]} == {one, two} and list(result["refused"]) == ["apr-none"]
    for _ in range(2):
        assert (await agent.post(f"{governed}/commands", json=TOUCH)).status_code == 200
    three = (await asked(agent, governed, {"command": "sleep 0"}))["approval"]
    rule = {"approve": True, "scope": "rule", "rule": "shell(sleep:*)"}
    assert (await ann.post(f"/v1/approvals/{three}/decide", json=rule)).json()["rule"] == "shell(sleep:*)"
    assert (await agent.post(f"{governed}/commands", json={"command": "sleep 0.01"})).status_code == 200
    policy = (await http.get("/v1/contexts/team:a/policy")).json()
    assert "shell(sleep:*)" in policy["settings"]["permissions"]["allow"] and policy["updated_by"] == "person:ann"


async def test_nobody_decides_their_own_request(http: httpx.AsyncClient, governed: str) -> None:
    handle = (await asked(http, governed))["approval"]
    problem = refused(await http.post(f"/v1/approvals/{handle}/decide", json={"approve": True}), 403, None)
    assert problem["detail"] == "nobody decides their own request"


async def test_waiting_for_the_decision(known: Known, governed: str) -> None:
    agent, ann = await known("coder", "agent", "operate"), await known("ann", "person", "approve")

    async def decide() -> None:
        while not (found := (await ann.get("/v1/approvals", params={"state": "pending"})).json()["items"]):
            await asyncio.sleep(0.02)
        await ann.post(f"/v1/approvals/{found[0]['id']}/decide", json={"approve": True})

    deciding = asyncio.ensure_future(decide())
    answer = await agent.post(f"{governed}/commands", json=TOUCH, headers={"carrel-wait": "60"})
    await deciding
    assert answer.json()["exit_code"] == 0
    answer = await agent.post(f"{governed}/commands", json={"command": "id"}, headers={"carrel-wait": "0.05"})
    refused(answer, 403, None, "approval_needed")


async def test_who_went_away_while_waiting(http: httpx.AsyncClient, known: Known, governed: str) -> None:
    """What nobody waits for any more is not done behind their back: the approval is still there to be used."""
    agent, ann = await known("coder", "agent", "operate"), await known("ann", "person", "approve")
    waiting = asyncio.ensure_future(agent.post(f"{governed}/commands", json=TOUCH, headers={"carrel-wait": "600"}))
    while not (found := (await ann.get("/v1/approvals")).json()["items"]):
        await asyncio.sleep(0.02)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    while not await records(http, result="approval_needed"):
        await asyncio.sleep(0.02)
    handle = found[0]["id"]
    await ann.post(f"/v1/approvals/{handle}/decide", json={"approve": True})
    answer = await agent.post(f"{governed}/commands", json=TOUCH, headers={"carrel-approval": handle})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("kind", ["application/x-ndjson", "text/event-stream"])
async def test_watching(known: Known, governed: str, kind: str) -> None:
    agent, ann = await known("coder", "agent", "operate"), await known("ann", "person", "approve", namespace="team")
    stranger = await known("bob", "person", "approve", namespace="other")
    handle = (await asked(agent, governed))["approval"]
    async with (
        ann.stream("GET", "/v1/approvals/watch", headers={"accept": kind}) as answer,
        stranger.stream("GET", "/v1/approvals/watch") as nothing,
    ):
        assert answer.headers["content-type"].startswith(kind) and nothing.status_code == 200
        seen = (json.loads(line.removeprefix("data: ")) async for line in answer.aiter_lines() if line)
        assert (await anext(seen))["id"] == handle
        other = (await asked(agent, governed, {"command": "id"}))["approval"]
        assert (await anext(seen))["id"] == other
        await ann.post(f"/v1/approvals/{handle}/decide", json={"approve": False})
        told = await anext(seen)
        assert (told["id"], told["state"]) == (handle, "denied")
        await seen.aclose()
    refused(await stranger.get(f"/v1/approvals/{handle}"), 403, None)
    refused(await stranger.post(f"/v1/approvals/{other}/decide", json={"approve": True}), 403, None)
    assert (await stranger.get("/v1/approvals")).json()["items"] == []


async def test_a_restart_keeps_what_waits_and_lets_everybody_go(settings: Settings) -> None:
    async with AsyncExitStack() as clients:

        def client(server: RunningServer, token: str | None) -> Awaitable[httpx.AsyncClient]:
            headers = {"authorization": f"Bearer {token}"}
            return clients.enter_async_context(httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60))

        async with running(settings) as first:
            root = await client(first, first.token)
            await root.put("/v1/contexts/c/policy", json={"settings": POLICY})
            tokens = [
                (await root.post("/v1/tokens", json={"name": name, "kind": kind, "scopes": [scope]})).json()["token"]
                for name, kind, scope in (("coder", "agent", "operate"), ("ann", "person", "approve"))
            ]
            await root.post("/v1/sandboxes", json={"context_id": "c", "trust": "high"})
            agent = await client(first, tokens[0])
            path, wait = "/v1/sandboxes/c/commands", {"carrel-wait": "600"}
            waiting = asyncio.ensure_future(agent.post(path, json={"command": "id"}, headers=wait))
            watched = await clients.enter_async_context(root.stream("GET", "/v1/approvals/watch"))
            lines = watched.aiter_lines()
            handle = json.loads(await anext(lines))["id"]
        assert (await waiting).json()["approval"] == handle, "who waits is told"
        assert [line async for line in lines if line] == []
        async with running(settings) as second:
            agent, ann = await client(second, tokens[0]), await client(second, tokens[1])
            assert (await ann.get(f"/v1/approvals/{handle}")).json()["state"] == "pending"
            assert (await ann.post(f"/v1/approvals/{handle}/decide", json={"approve": True})).status_code == 200
            await agent.post("/v1/sandboxes", json={"context_id": "c"})
            given = {"carrel-approval": handle}
            assert (await agent.post(path, json={"command": "id"}, headers=given)).json()["exit_code"] == 0
