"""The server is killed at seeded moments under load, and NATS with it if there is one: a reader that goes on with
`Last-Event-ID` misses no event and gets none twice, and the stream of NATS has them all in order.

`CARREL_EVENT_KILLS=100` kills more often.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from random import Random
from typing import Any

import httpx
import nats
import pytest
from tests.support.kill_server import Server
from tests.support.nats import NatsServer
from tests.support.postgres import Postgres

from carrel.errors import CarrelError
from carrel.events.nats_bus import STREAM

KILLS = int(os.environ.get("CARREL_EVENT_KILLS", "2"))
CONTEXT = "busy"
Json = dict[str, Any]


@pytest.fixture(autouse=True)
def _forks(carrel_forks: None) -> None: ...


@pytest.fixture(params=["sqlite", "postgresql"])
async def database(request: pytest.FixtureRequest) -> AsyncIterator[str | None]:
    if request.param == "sqlite":
        yield None
        return
    postgres: Postgres = request.getfixturevalue("postgres")
    schema = f"e{os.urandom(8).hex()}"
    await postgres.execute(f"CREATE SCHEMA {schema}")
    yield postgres.url(search_path=schema)
    await postgres.execute(f"DROP SCHEMA {schema} CASCADE")


@pytest.fixture(params=["nats", "no bus"])
def bus(request: pytest.FixtureRequest) -> Iterator[NatsServer | None]:
    if request.param == "no bus":
        yield None
        return
    server = NatsServer()
    yield server
    server.close()


class Reader:
    """Reads the stream of all events, and connects again wherever the server is by then."""

    def __init__(self, server: Server):
        self.seen: list[Json] = []
        self.breaks = 0
        self._server = server

    async def run(self) -> None:
        while True:
            with suppress(httpx.HTTPError, OSError, ValueError, KeyError):
                await self._read()
            self.breaks += 1
            await asyncio.sleep(0.02)

    async def _read(self) -> None:
        about = json.loads((self._server.data / "server.json").read_bytes())
        token = (self._server.data / "token").read_text().strip()
        last = self.seen[-1]["id"] if self.seen else 0
        headers = {"authorization": f"Bearer {token}", "last-event-id": str(last)}
        async with (
            httpx.AsyncClient(base_url=about["url"], headers=headers, timeout=30) as client,
            client.stream("GET", "/v1/events") as answer,
        ):
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    self.seen.append(json.loads(line[6:]))


class Work:
    """Runs commands and publishes records, and keeps what the server has confirmed."""

    def __init__(self, server: Server):
        self.ran: list[str] = []
        self.published: list[str] = []
        self.started: list[str] = []
        self._server = server

    async def commands(self, worker: int) -> None:
        number = 0
        while True:
            with suppress(CarrelError, OSError, ValueError):
                async with self._server.client() as client:
                    box = await client.sandbox(CONTEXT)
                    while True:
                        number += 1
                        word = f"echo {worker}-{number}"
                        await box.commands.run(word)
                        self.ran.append(word)
                        if number % 5 == 0:
                            background = await box.commands.start(f"sleep 0.3; echo {word}")
                            self.started.append(background.id)
            await asyncio.sleep(0.02)

    async def records(self) -> None:
        number = 0
        while True:
            with suppress(CarrelError, OSError, ValueError):
                async with self._server.client() as client:
                    while True:
                        number += 1
                        await client.publish_log([{"message": f"log {number}"}], context=CONTEXT)
                        self.published.append(f"log {number}")
                        await asyncio.sleep(0.005)
            await asyncio.sleep(0.02)


async def everything(server: Server) -> list[Json]:
    async with server.client() as client:
        return [each.model_dump(mode="json", exclude_none=True) async for each in client.events(after=0, follow=False)]


async def delivered(server: NatsServer, count: int) -> list[int]:
    """The ids in the stream, once it has that many."""
    client = await nats.connect(server.url)
    try:
        stream = client.jetstream()
        async with asyncio.timeout(60):
            while (state := (await stream.stream_info(STREAM)).state).messages < count:
                await asyncio.sleep(0.05)
        found = [await stream.get_msg(STREAM, seq=number) for number in range(1, state.last_seq + 1)]
        return [int((each.headers or {})["Nats-Msg-Id"].partition("-")[2]) for each in found]
    finally:
        await client.close()


async def test_no_event_is_missing_or_doubled(database: str | None, bus: NatsServer | None) -> None:
    dice = Random(7)
    server = Server(database, "directory", settings={} if bus is None else {"CARREL_BUS": bus.url})
    reader, work = Reader(server), Work(server)
    try:
        await server.start()
        running = [
            asyncio.create_task(each) for each in (reader.run(), work.commands(1), work.commands(2), work.records())
        ]
        for number in range(KILLS):
            await asyncio.sleep(dice.uniform(0.3, 1.2))
            if bus is not None and number % 2 == 0:
                bus.kill()
                await asyncio.sleep(dice.uniform(0.1, 0.5))
            server.kill()
            await server.killed()
            await server.start()
            if bus is not None and number % 2 == 0:
                await asyncio.sleep(dice.uniform(0.1, 0.5))
                bus.start()
        await asyncio.sleep(0.5)
        for task in running[1:]:
            task.cancel()
        await asyncio.gather(*running[1:], return_exceptions=True)
        async with asyncio.timeout(60 + KILLS):
            before = None
            while (now := await everything(server)) != before:  # until the last end of a command is written
                before = now
                await asyncio.sleep(0.3)
            while not reader.seen or reader.seen[-1]["id"] < now[-1]["id"]:
                await asyncio.sleep(0.02)
        running[0].cancel()
        await asyncio.gather(running[0], return_exceptions=True)
        assert reader.breaks >= KILLS
        ids = [each["id"] for each in reader.seen]
        assert ids == [*range(1, len(ids) + 1)], "every number once, in order"
        assert [(each["id"], each["kind"], each["body"]) for each in reader.seen] == [
            (each["id"], each["kind"], each["body"]) for each in now
        ]
        if bus is not None:
            assert await delivered(bus, len(ids)) == ids
        started = Counter(each["body"]["command"] for each in now if each["kind"] == "command.started")
        ended = Counter(each["body"]["record"] for each in now if each["kind"] == "command.ended")
        said = Counter(each["body"]["message"] for each in now if each["kind"] == "log")
        assert len(work.ran) > 10
        assert len(work.published) > 10
        assert [word for word in work.ran if started[word] != 1] == []
        assert [word for word in work.published if said[word] != 1] == []
        assert [count for count in ended.values() if count != 1] == []
        assert len(work.started) > 3
        begun = {each["body"]["record"] for each in now if each["kind"] == "command.started"}
        assert begun == set(ended), "each command that began has an end, also if the server was killed in it"
        await server.stop()
    finally:
        server.close()
