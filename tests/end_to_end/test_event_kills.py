"""The server is killed at seeded moments under load, and NATS with it if there is one: a reader that goes on with
`Last-Event-ID` misses no event and gets none twice, and the stream of NATS has them all in order.

`CARREL_EVENT_KILLS=100` kills more often.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from contextlib import suppress
from random import Random

import pytest
from tests.support.kill_events import Reader, delivered, events_of, kill_and_start
from tests.support.kill_server import Server
from tests.support.nats import NatsServer

from carrel.errors import CarrelError

KILLS = int(os.environ.get("CARREL_EVENT_KILLS", "2"))
CONTEXT = "busy"


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


@pytest.mark.timeout(300 + KILLS * 20)
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
            await kill_and_start(server, bus if number % 2 == 0 else None, dice)
        await asyncio.sleep(0.5)
        for task in running[1:]:
            task.cancel()
        await asyncio.gather(*running[1:], return_exceptions=True)
        async with asyncio.timeout(60 + KILLS):
            before = None
            while (now := await events_of(server)) != before:  # until the last end of a command is written
                before = now
                await asyncio.sleep(0.3)
        await reader.reaches(now[-1]["id"])
        running[0].cancel()
        await asyncio.gather(running[0], return_exceptions=True)
        assert reader.breaks >= KILLS
        ids = reader.ids
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
