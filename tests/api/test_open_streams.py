"""What is open ends with the token it was opened with: every stream the API has, against a real server."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.governed import Known
from tests.support.refusals import refused
from websockets.asyncio.client import ClientConnection, connect

from carrel.identity import Tokens
from carrel.server import RunningServer
from carrel.store.tokens import TokenStore

Ended = Callable[[], Awaitable[None]]


@pytest.fixture
async def token(http: httpx.AsyncClient) -> dict[str, Any]:
    wanted = {"name": "coder", "kind": "agent", "scopes": ["operate"]}
    return dict((await http.post("/v1/tokens", json=wanted)).json())


def headers(token: dict[str, Any]) -> dict[str, str]:
    return {"authorization": f"Bearer {token['token']}"}


@asynccontextmanager
async def stream(
    server: RunningServer, token: dict[str, Any], method: str, path: str, **more: Any
) -> AsyncIterator[Ended]:
    """A stream that has begun; waiting for its end says that it was broken off."""
    async with (
        httpx.AsyncClient(base_url=server.url, headers=headers(token), timeout=30) as client,
        client.stream(method, path, **more) as answer,
    ):
        assert answer.status_code == 200, await answer.aread()
        pieces = answer.aiter_raw()
        await anext(pieces)

        async def ended() -> None:
            with pytest.raises(httpx.RemoteProtocolError):
                async for _ in pieces:
                    pass

        yield ended


async def says(socket: ClientConnection, words: bytes) -> None:
    """Until a terminal has said this: its echo may come letter by letter."""
    seen = b""
    while words not in seen:
        seen += bytes(await socket.recv())  # type: ignore[arg-type]


@asynccontextmanager
async def terminal(server: RunningServer, token: dict[str, Any], box: str) -> AsyncIterator[Ended]:
    url = f"{server.url.replace('http', 'ws')}{box}/terminals?command=cat"
    async with connect(url, additional_headers=headers(token), proxy=None) as socket:
        await socket.send(b"hello\n")
        await says(socket, b"hello")

        async def ended() -> None:
            while isinstance(message := await socket.recv(), bytes):
                pass
            assert json.loads(message)["error"]["code"] == "unauthorized"
            await socket.wait_closed()
            assert socket.close_code == 1008

        yield ended


async def everything(stack: AsyncExitStack, server: RunningServer, token: dict[str, Any], box: str) -> list[Ended]:
    """Everything that can be open at once."""
    command = {"command": "echo begun; sleep 999"}
    http = await stack.enter_async_context(httpx.AsyncClient(base_url=server.url, headers=headers(token)))
    id = (await http.post(f"{box}/commands/start", json=command)).json()["id"]
    asking = await http.post(f"{box}/commands", json={"command": "id"})
    assert asking.status_code == 403, "something has to wait, or a watch has nothing to begin with"
    opened = [
        stream(server, token, "POST", f"{box}/commands/stream", json=command),
        stream(server, token, "GET", f"{box}/commands/{id}/output"),
        stream(server, token, "GET", "/v1/approvals/watch"),
        stream(server, token, "GET", "/v1/approvals/watch", headers={"accept": "text/event-stream"}),
        terminal(server, token, box),
    ]
    return [await stack.enter_async_context(each) for each in opened]


@pytest.fixture
async def box(http: httpx.AsyncClient) -> str:
    settings = {
        "permissions": {
            "allow": ["shell(sleep:*)", "shell(cat:*)", "file(read:${WORKSPACE}/**)", "file(write:${WORKSPACE}/**)"]
        }
    }
    assert (await http.put("/v1/contexts/busy/policy", json={"settings": settings})).status_code == 200
    assert (await http.post("/v1/sandboxes", json={"context_id": "busy", "trust": "high"})).status_code == 201
    return "/v1/sandboxes/busy"


async def test_revoking_ends_all_that_is_open(
    server: RunningServer, http: httpx.AsyncClient, token: dict[str, Any], box: str
) -> None:
    async with AsyncExitStack() as stack, asyncio.timeout(30):
        ends = await everything(stack, server, token, box)
        assert server.plane.requests.tokens() == [token["id"]]
        assert (await http.delete(f"/v1/tokens/{token['id']}")).status_code == 200
        for ended in ends:
            await ended()
        while (
            server.plane.requests.tokens()
            or sum(each["running"] for each in (await http.get(f"{box}/commands")).json()["items"]) > 2
        ):
            await asyncio.sleep(0.02)  # the terminal's command dies with it, the others go on


async def test_another_token_is_left_alone(
    server: RunningServer, http: httpx.AsyncClient, token: dict[str, Any], box: str
) -> None:
    wanted = {"name": "other", "kind": "agent", "scopes": ["operate"]}
    other = (await http.post("/v1/tokens", json=wanted)).json()
    async with terminal(server, token, box) as ended, asyncio.timeout(30):
        url = f"{server.url.replace('http', 'ws')}{box}/terminals?command=cat"
        async with connect(url, additional_headers=headers(other), proxy=None) as socket:
            await http.delete(f"/v1/tokens/{token['id']}")
            await ended()
            await socket.send(b"still here\n")
            await says(socket, b"still")


async def test_expiry_ends_them_too(server: RunningServer, http: httpx.AsyncClient, box: str) -> None:
    for seconds in (5, 40):  # all of it must be open by then; on a busy machine that takes long
        end = datetime.now(UTC) + timedelta(seconds=seconds)
        wanted = {"name": f"short-{seconds}", "kind": "agent", "scopes": ["operate"], "expires_at": end.isoformat()}
        token = (await http.post("/v1/tokens", json=wanted)).json()
        async with AsyncExitStack() as stack, asyncio.timeout(seconds + 60):
            try:
                ends = await everything(stack, server, token, box)
            except Exception:
                if seconds == 40 or datetime.now(UTC) < end:
                    raise
                continue
            for ended in ends:
                await ended()
            assert datetime.now(UTC) >= end
            return


async def test_what_another_server_revokes_ends_soon(server: RunningServer, token: dict[str, Any], box: str) -> None:
    elsewhere = Tokens(TokenStore(server.plane._database), None, lambda _: None)
    async with terminal(server, token, box) as ended, asyncio.timeout(30):
        await elsewhere.revoke(token["id"])
        await server.plane.end_revoked()  # upkeep does it every few seconds
        await ended()


async def test_an_upload_and_an_answer_that_come_too_late(
    server: RunningServer, http: httpx.AsyncClient, token: dict[str, Any], box: str
) -> None:
    sent, revoked = asyncio.Event(), asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b"begun"
        sent.set()
        await revoked.wait()

    async with httpx.AsyncClient(base_url=server.url, headers=headers(token), timeout=30) as agent:
        upload = asyncio.ensure_future(agent.put(f"{box}/files/content", params={"path": "late"}, content=body()))
        [live] = server.plane.sessions.live()
        os.mkfifo(pipe := Path(live.workspace, "pipe"))
        pipe.chmod(0o666)
        slow = asyncio.ensure_future(agent.post(f"{box}/commands", json={"command": "cat pipe"}))
        await sent.wait()
        async with asyncio.timeout(30):
            while len(server.plane.requests._by_token.get(token["id"], ())) < 2:
                await asyncio.sleep(0.01)
            await http.delete(f"/v1/tokens/{token['id']}")
            revoked.set()
            await asyncio.to_thread(pipe.write_bytes, b"")  # opens once it is read from, and ends it
            problem = refused(await slow, 401, "Authorization")
            assert "was revoked while this was under way" in problem["detail"]
            assert (await upload).status_code == 401
    gone = await http.get(f"{box}/files/stat", params={"path": "late"})
    assert gone.status_code == 404, "whole or not at all"


async def test_who_waits_for_a_person_and_is_revoked_gets_nothing_done(
    server: RunningServer, http: httpx.AsyncClient, known: Known, token: dict[str, Any], box: str
) -> None:
    ann = await known("ann", "person", "approve")
    async with httpx.AsyncClient(base_url=server.url, headers=headers(token), timeout=30) as agent:
        command = {"command": "touch made"}
        waiting = asyncio.ensure_future(agent.post(f"{box}/commands", json=command, headers={"carrel-wait": "20"}))
        async with asyncio.timeout(30):
            while not (found := (await ann.get("/v1/approvals", params={"state": "pending"})).json()["items"]):
                await asyncio.sleep(0.02)
            await http.delete(f"/v1/tokens/{token['id']}")
            assert (await waiting).status_code in {401, 403}
        await ann.post(f"/v1/approvals/{found[0]['id']}/decide", json={"approve": True})
    assert (await http.get(f"{box}/files/stat", params={"path": "made"})).status_code == 404


async def test_who_revokes_their_own_token_is_told_so(server: RunningServer, http: httpx.AsyncClient) -> None:
    wanted = {"name": "ann", "kind": "person", "scopes": ["administer"]}
    made = (await http.post("/v1/tokens", json=wanted)).json()
    async with httpx.AsyncClient(base_url=server.url, headers=headers(made)) as ann:
        answer = await ann.delete(f"/v1/tokens/{made['id']}")
        assert answer.status_code == 200 and answer.json()["revoked_at"]
        assert (await ann.get("/v1/tokens")).status_code == 401
