"""The streams of events of a real server."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from tests.support.governed import Known
from tests.support.refusals import refused

from carrel.api import events as events_module
from carrel.control.governance import log_records
from carrel.server import RunningServer

READERS = int(os.environ.get("CARREL_EVENT_READERS", "20"))
RECORDS = int(os.environ.get("CARREL_EVENT_RECORDS", "1000"))
Json = dict[str, Any]


async def stored(http: httpx.AsyncClient, path: str = "/v1/events", **query: object) -> list[Json]:
    answer = await http.get(path, params={"after": 0, "follow": "false", **query})  # type: ignore[arg-type]
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]


async def until(http: httpx.AsyncClient, kind: str, path: str = "/v1/events") -> list[Json]:
    """The events, once there is one of a kind."""
    async with asyncio.timeout(30):
        while True:
            found = await stored(http, path)
            if any(each["kind"] == kind for each in found):
                return found
            await asyncio.sleep(0.02)


@asynccontextmanager
async def following(
    http: httpx.AsyncClient, path: str = "/v1/events", **more: Any
) -> AsyncIterator[AsyncIterator[str]]:
    async with http.stream("GET", path, timeout=30, **more) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield answer.aiter_lines()


async def next_data(lines: AsyncIterator[str]) -> Json:
    async with asyncio.timeout(30):
        async for line in lines:
            if line.startswith("data: "):
                return dict(json.loads(line[6:]))
    raise AssertionError("the stream ended")


async def publish(http: httpx.AsyncClient, context: str | None, *messages: str) -> None:
    body = {"context_id": context, "records": [{"message": message} for message in messages]}
    answer = await http.post("/v1/events", json={key: value for key, value in body.items() if value is not None})
    assert (answer.status_code, answer.json().get("stored")) == (200, len(messages)), answer.text


async def test_what_happens_in_a_sandbox_is_told(http: httpx.AsyncClient, box: str) -> None:
    assert (await http.post(f"{box}/commands", json={"command": "echo hi; exit 3"})).json()["exit_code"] == 3
    assert (await http.put(f"{box}/files/content?path=a", content=b"1")).status_code == 200
    assert (await http.request("DELETE", f"{box}/files?path=a")).status_code == 204
    started = await http.post(f"{box}/commands/start", json={"command": "exit 4"})
    ended: list[Json] = []
    async with asyncio.timeout(30):
        while len(ended) < 2:
            events = await stored(http, "/api/stream/box")
            ended = [each for each in events if each["kind"] == "command.ended"]
    assert [each["kind"] for each in events] == [
        "session", "session", "command.started", "command.ended", "file.written", "file.deleted", "command.started",
        "command.ended",
    ]  # fmt: skip
    assert [each["id"] for each in events] == sorted({each["id"] for each in events})
    assert [each["body"].get("state") for each in events[:2]] == ["creating", "running"]
    begun = [each["body"] for each in events if each["kind"] == "command.started"]
    assert begun[0]["command"] == "echo hi; exit 3"
    first, second = (each["body"] for each in ended)
    assert (first["exit"], first["exit_code"], first["record"]) == ("failed", 3, begun[0]["record"])
    assert (second["exit_code"], second["command_id"]) == (4, started.json()["id"])
    assert "hi\n" not in json.dumps(first), "output is read by its reference"
    assert {each["session_id"] for each in events} == {box.rsplit("/", 1)[1]}
    assert events == await stored(http, f"/api/stream/{box.rsplit('/', 1)[1]}")


async def test_refusals_and_approvals_are_told(http: httpx.AsyncClient, governed: str, known: Known) -> None:
    agent = await known("a", "agent", "operate", contexts=["team:a"])
    for command in ("curl x", "make it"):
        assert (await agent.post(f"{governed}/commands", json={"command": command})).status_code == 403
    told = {each["kind"]: each["body"] for each in await until(agent, "operation.refused")}
    assert told["operation.refused"]["command"] == "curl x"
    name = told["approval.asked"]["approval"]
    assert (await http.post(f"/v1/approvals/{name}/decide", json={"approve": False})).status_code == 200
    decided = (await stored(agent, kind="approval.decided"))[0]["body"]
    assert (decided["approval"], decided["state"]) == (name, "denied")


async def test_a_stream_goes_on_where_its_reader_was(http: httpx.AsyncClient, box: str) -> None:
    await publish(http, "box", "one", "two", "three")
    ids = [each["id"] for each in await stored(http, kind="log")]
    async with following(http, "/v1/events?kind=log", headers={"last-event-id": str(ids[0])}) as lines:
        assert [(await next_data(lines))["id"] for _ in range(2)] == ids[1:]
        await publish(http, "box", "four")
        four = await next_data(lines)
        assert (four["body"]["message"], four["kind"]) == ("four", "log")
    for wrong in ("x", "-1", "9" * 30):
        refused(await http.get("/v1/events", headers={"last-event-id": wrong}), 400, "Last-Event-ID")
    refused(await http.get("/v1/events?kind=comand"), 400, "kind")
    refused(await http.get("/v1/events?after=-1"), 400, "after")
    refused(await http.get("/api/stream/nobody"), 404, "id")


async def test_a_silent_stream_says_that_it_lives_and_moves_its_reader(
    http: httpx.AsyncClient, box: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "BEAT_S", 0.05)
    async with following(http, "/v1/events?kind=connection") as lines:
        first = await anext(lines)
        while not first.startswith("id: "):
            first = await anext(lines)
        await publish(http, "box", "not for this reader")
        async with asyncio.timeout(30):
            async for line in lines:
                if line.startswith("id: ") and int(line[4:]) > int(first[4:]):
                    break


async def test_a_token_sees_only_its_contexts(http: httpx.AsyncClient, known: Known) -> None:
    for context in ("team:a", "team:b", "other:c"):
        await publish(http, context, context)
    await publish(http, None, "of nobody")
    one = await known("one", "agent", "read", contexts=["team:a"])
    team = await known("team", "agent", "read", namespace="team")
    logger = await known("logger", "service", "log", contexts=["team:b"])
    assert [each["body"]["message"] for each in await stored(http)] == ["team:a", "team:b", "other:c", "of nobody"]
    assert [each["body"]["message"] for each in await stored(one)] == ["team:a"]
    assert [each["body"]["message"] for each in await stored(team)] == ["team:a", "team:b"]
    refused(await one.get("/v1/events?context_id=team:b"), 403, None)
    refused(await one.get("/api/stream/team:b"), 403, None)
    refused(await logger.get("/v1/events"), 403, None)
    await publish(logger, "team:b", "mine")
    for context in ("team:a", None):
        body = {"records": [{"message": "x"}]} | ({} if context is None else {"context_id": context})
        refused(await logger.post("/v1/events", json=body), 403, None)
    refused(await one.post("/v1/events", json={"context_id": "team:a", "records": [{"message": "x"}]}), 403, None)
    async with following(one) as lines:
        await publish(http, "team:b", "secret")
        await publish(http, "team:a", "shown")
        assert (await next_data(lines))["body"]["message"] == "shown"


async def test_a_revoked_token_ends_the_stream(http: httpx.AsyncClient, known: Known) -> None:
    await publish(http, "box", "one")
    reader = await known("reader", "agent", "read")
    async with following(reader, "/v1/events?after=0") as lines:
        await next_data(lines)
        tokens = (await http.get("/v1/tokens")).json()["items"]
        [mine] = [each["id"] for each in tokens if each["name"] == "reader"]
        assert (await http.delete(f"/v1/tokens/{mine}")).status_code == 200
        with pytest.raises(httpx.RemoteProtocolError):
            async with asyncio.timeout(30):
                async for _ in lines:
                    pass


async def test_log_records_have_no_secrets_and_are_bounded(http: httpx.AsyncClient, box: str) -> None:
    secret = "correct-horse-battery"
    assert (await http.put("/v1/contexts/box/secrets/KEY", json={"value": secret})).status_code == 200
    long = "x" * 1990 + secret + "y" * 20_000
    records = [{"message": f"key {secret}", "logger": "app", "level": "ERROR"}, {"message": long}]
    answer = await http.post("/v1/events", json={"context_id": "box", "records": records, "dropped": 7})
    assert answer.json() == {"stored": 2}
    first, second = (each["body"] for each in await stored(http, kind="log"))
    assert first["message"] == "key [secret:KEY]"
    assert (first["level"], first["logger"], first["dropped"]) == ("ERROR", "app", 7)
    assert "corr" not in second["message"]
    assert len(json.dumps(second)) < 5000
    assert (await http.post("/v1/sandboxes/box/commands", json={"command": f"echo {secret}"})).status_code == 200
    [begun] = await stored(http, kind="command.started")
    assert begun["body"]["command"] == "echo [secret:KEY]"
    for wrong in ({}, {"records": []}, {"records": [{"message": "x"}] * 501}, {"records": [{"text": "x"}]}):
        assert (await http.post("/v1/events", json=wrong)).status_code == 400


async def test_one_caller_cannot_flood_the_log(
    http: httpx.AsyncClient, known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_records, "BURST", 5.0)
    monkeypatch.setattr(log_records, "PER_SECOND", 0.001)
    loud, other = await known("loud", "service", "log"), await known("other", "service", "log")
    await publish(loud, "c", *"abcd")
    refused(await loud.post("/v1/events", json={"context_id": "c", "records": [{"message": "x"}] * 2}), 429, "records")
    await publish(other, "c", "e")


async def test_retention_is_told_to_a_reader(http: httpx.AsyncClient, server: RunningServer) -> None:
    await publish(http, "c", *"abc")
    await server.plane.events._store.remove(2)
    found = await stored(http)
    assert [(each["kind"], each["id"]) for each in found] == [("truncated", 2), ("log", 3)]


async def test_a_forgotten_context_has_no_events(http: httpx.AsyncClient, box: str) -> None:
    await publish(http, "box", "mine")
    await publish(http, "other", "theirs")
    assert (await http.delete("/v1/contexts/box")).status_code == 204
    assert [each.get("context_id") for each in await until(http, "context.forgotten")] == ["other", None]


def silent(server: RunningServer) -> socket.socket:
    """A reader that asks for everything and then reads nothing."""
    where = urlsplit(server.url)
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader.connect((where.hostname, where.port))
    head = f"GET /v1/events?after=0 HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {server.token}\r\n\r\n"
    reader.sendall(head.encode())
    return reader


async def test_many_readers_of_a_busy_context_miss_nothing_beside_one_that_does_not_read(
    http: httpx.AsyncClient, server: RunningServer
) -> None:
    """The reader that does not read gets no more than its buffers hold, and the others do not wait for it."""
    stuck = silent(server)
    text = "x" * 500

    async def read() -> list[int]:
        seen: list[int] = []
        async with following(http, "/v1/events?after=0&context_id=busy") as lines:
            async for line in lines:
                if line.startswith("id: "):
                    seen.append(int(line[4:]))
                    if len(set(seen)) >= RECORDS + 1:
                        return seen
        raise AssertionError("the stream ended")

    limits = httpx.Limits(max_connections=None)
    try:
        async with httpx.AsyncClient(base_url=server.url, headers=http.headers, timeout=60, limits=limits) as client:
            http = client
            reading = [asyncio.create_task(read()) for _ in range(READERS)]
            async with asyncio.timeout(120):
                for start in range(0, RECORDS, 100):
                    await publish(client, "busy", *[f"{number} {text}" for number in range(start, start + 100)])
                for seen in await asyncio.gather(*reading):
                    assert seen == [0, *range(1, RECORDS + 1)]
        sent = 0
        stuck.settimeout(1)
        while data := stuck.recv(1 << 20):
            sent += len(data)
            if data.endswith(f"id: {RECORDS}\n".encode()) or f'"id": {RECORDS},'.encode() in data:
                break
        assert sent > RECORDS * 500, "and when it reads again, it gets everything"
    finally:
        stuck.close()
