"""The agent as others reach it: by JSON-RPC and REST, with the protocol of today and the one before."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import uuid
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from a2a.client.errors import A2AClientError
from a2a.utils.constants import TransportProtocol
from tests.support.a2a_ground import Ground, Process, answer, caller, state, until

from carrel.connections import MAX_HEAD
from carrel.errors import InvalidRequest, PlatformError
from carrel.integrations.a2a.server import AgentSettings, running
from carrel.integrations.http import read_token_file


@pytest.mark.parametrize("binding", [TransportProtocol.JSONRPC, TransportProtocol.HTTP_JSON])
@pytest.mark.parametrize("streaming", [False, True])
async def test_every_binding(ground: Ground, binding: str, streaming: bool) -> None:
    async with ground.agent() as agent, caller(agent.url, ground.token, streaming=streaming, binding=binding) as one:
        task = await one.send("echo hello", context=ground.context)
        assert (state(task), answer(task)) == ("completed", "hello")
        waits = await one.send("uname -s", context=ground.context)
        assert state(waits) == "input_required"
        assert state(await one.cancel(waits.id)) == "canceled"


async def test_the_protocol_of_before(ground: Ground) -> None:
    async with ground.agent() as agent, httpx.AsyncClient(base_url=agent.url, trust_env=False, timeout=30) as http:
        message = {"role": "user", "messageId": uuid.uuid4().hex, "contextId": ground.context, "kind": "message",
                   "parts": [{"kind": "text", "text": "echo hello"}]}  # fmt: skip
        body = {"jsonrpc": "2.0", "id": 1, "method": "message/send", "params": {"message": message}}
        answer = await http.post("/", json=body, headers={"authorization": f"Bearer {ground.token}"})
        result = answer.json()["result"]
        assert result["status"]["state"] == "completed"
        assert result["artifacts"][0]["parts"][0]["text"] == "hello"
        body = {"jsonrpc": "2.0", "id": 2, "method": "tasks/get", "params": {"id": result["id"]}}
        answer = await http.post("/", json=body, headers={"authorization": f"Bearer {ground.token}"})
        assert answer.json()["result"]["id"] == result["id"]


async def test_long_heads_are_refused_and_known_callers_stay(ground: Ground) -> None:
    async with ground.agent() as agent, httpx.AsyncClient(base_url=agent.url, trust_env=False) as http:
        long = await http.get("/healthz", headers={"x": "a" * 2 * MAX_HEAD})
        assert (long.status_code, long.json()["code"]) == (431, "too_large")
        shown = {"authorization": f"Bearer {ground.token}"}
        assert [(await http.get("/metrics", headers=shown)).status_code for _ in range(2)] == [200, 200]


async def test_card_and_health_are_public_and_nothing_else(ground: Ground) -> None:
    async with ground.agent() as agent, httpx.AsyncClient(base_url=agent.url, trust_env=False) as http:
        card = (await http.get("/.well-known/agent-card.json")).json()
        assert card["supportedInterfaces"][0]["url"] == agent.url + "/"
        assert card["securitySchemes"]["carrel"]
        assert (await http.get("/healthz")).json() == {"status": "ok"}
        for path in ("/metrics", "/rest/tasks", "/extendedAgentCard", "/x"):
            assert (await http.get(path)).status_code == 401
        assert (await http.post("/", json={})).status_code == 401
        shown = await http.get("/metrics", headers={"authorization": f"Bearer {ground.token}"})
        assert "carrel_llm" in shown.text


async def test_a_caller_without_token_gets_nothing(ground: Ground) -> None:
    async with ground.agent() as agent, caller(agent.url, None) as nobody:
        with pytest.raises(A2AClientError, match="401"):
            await nobody.send("true", context=ground.context)


async def test_the_address_on_the_card(ground: Ground) -> None:
    async with ground.agent(public_url="https://agents.example.org/x/") as agent:
        assert agent.card_url == "https://agents.example.org/x/.well-known/agent-card.json"


async def test_several_start_at_once_on_an_empty_database(ground: Ground, database: str) -> None:
    async with AsyncExitStack() as stack:
        agents = [stack.enter_async_context(ground.agent(database=database)) for _ in range(3)]
        one, *_ = await asyncio.gather(*agents)
        async with caller(one.url, ground.token) as found:
            assert state(await found.send("true", context=ground.context)) == "completed"


async def test_an_address_that_is_taken(ground: Ground) -> None:
    async with ground.agent() as agent:
        port = int(agent.url.rpartition(":")[2])
        with pytest.raises(PlatformError, match="cannot listen"):
            async with running(ground.settings(port=port, database=str(ground.directory / "other.db"))):
                pass
    with pytest.raises(InvalidRequest):
        async with running(ground.settings(host="not an address")):
            pass


def test_the_approvers_token_is_read_and_not_shown(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("carrel_secret\n")
    settings = AgentSettings("http://x", "db", approver_token=read_token_file(tmp_path / "token"))
    assert settings.approver_token == "carrel_secret"
    assert "carrel_secret" not in repr(settings)
    (tmp_path / "odd").write_text("two words")
    for name in ("odd", "missing"):
        with pytest.raises(InvalidRequest):
            read_token_file(tmp_path / name)


def test_the_example_runs(ground: Ground, server: dict[str, str]) -> None:
    example = Path(__file__).parents[3] / "examples" / "a2a_client.py"
    environment = {**os.environ, "CARREL_URL": server["url"], "CARREL_TOKEN": server["token"]}
    run = subprocess.run(
        [sys.executable, "-W", "error", str(example)], env=environment, capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "output/sum.txt: b'42\\n'" in run.stdout
    assert run.stdout.rstrip().endswith("answer: Linux\n  [completed]")


async def test_card_can_be_cached_and_revalidated(ground: Ground) -> None:
    async with ground.agent() as agent, httpx.AsyncClient(base_url=agent.url, trust_env=False) as http:
        for path in ("/.well-known/agent-card.json", "/.well-known/agent.json"):
            card = await http.get(path)
            assert "max-age=" in card.headers["cache-control"]
            again = await http.get(path, headers={"if-none-match": card.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")


def _rpc(method: str, params: object, **more: object) -> dict[str, object]:
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params, **more}


def _wrong_requests(task_id: str) -> list[dict[str, object]]:
    """Requests that name no task, one that has ended, or that are not valid."""
    words = {"role": "ROLE_USER", "messageId": "m", "parts": [{"text": "true"}]}
    return [
        _rpc("SubscribeToTask", {"id": "missing"}),
        _rpc("SubscribeToTask", {"id": task_id}),
        _rpc("SendMessage", {"message": {**words, "taskId": "missing"}}),
        _rpc("SendMessage", {"message": {**words, "taskId": task_id}}),
        _rpc("CancelTask", {"id": task_id}),
        _rpc("SendMessage", {"message": {"parts": "x"}}),
        _rpc("GetExtendedAgentCard", {}),
        _rpc("GetTask", {}, id={}),
        {"jsonrpc": "2.0"},
    ]


async def test_requests_that_fail_leave_no_queue_behind(ground: Ground) -> None:
    headers = {"authorization": f"Bearer {ground.token}", "a2a-version": "1.0"}
    async with (
        ground.agent() as agent,
        caller(agent.url, ground.token) as one,
        httpx.AsyncClient(base_url=agent.url, trust_env=False, timeout=30, headers=headers) as http,
    ):
        ended = await one.send("true", context=ground.context)
        for request in _wrong_requests(ended.id):
            assert "error" in (await http.post("/", json=request)).json(), request

        async def no_queue_left() -> bool:
            return not [task for task in asyncio.all_tasks() if "_dispatch_loop" in repr(task.get_coro())]

        await until(no_queue_left)


async def test_wrong_requests_are_not_in_the_agents_log(ground: Ground, tmp_path: Path) -> None:
    headers = {"authorization": f"Bearer {ground.token}"}
    with (tmp_path / "log").open("w+") as log:
        process = Process(ground, stderr=log)
        try:
            async with httpx.AsyncClient(base_url=process.url, trust_env=False, timeout=30, headers=headers) as http:
                for version in ("1.0", "0.3"):
                    for request in _wrong_requests("missing"):
                        await http.post("/", json=request, headers={"a2a-version": version})
                    await http.post("/", content=b"{", headers={"a2a-version": version})
        finally:
            assert process.stop() == 0
        assert (tmp_path / "log").read_text() == ""


def test_a_process_ends_when_it_is_told_to(ground: Ground) -> None:
    assert Process(ground).stop() == 0
