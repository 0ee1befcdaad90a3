"""A reader of the event stream of a server that is killed and started again, and the buses that die with it."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from random import Random
from typing import Any

import httpx
import nats
from tests.support.kill_server import Server
from tests.support.nats import NatsServer

from carrel.events.nats_bus import STREAM

Json = dict[str, Any]


class Reader:
    """Reads events with `Last-Event-ID`, and connects again wherever the server is by then."""

    def __init__(self, server: Server, query: str = ""):
        self.seen: list[Json] = []
        self.breaks = 0
        self._server = server
        self._query = query
        self._last = 0

    @property
    def ids(self) -> list[int]:
        """What it was given, in the order in which it came."""
        return [each["id"] for each in self.seen]

    async def run(self) -> None:
        while True:
            with suppress(httpx.HTTPError, OSError, ValueError, KeyError):
                await self._read()
            self.breaks += 1
            await asyncio.sleep(0.02)

    async def _read(self) -> None:
        about = json.loads((self._server.data / "server.json").read_bytes())
        token = (self._server.data / "token").read_text().strip()
        headers = {"authorization": f"Bearer {token}", "last-event-id": str(self._last)}
        async with (
            httpx.AsyncClient(base_url=about["url"], headers=headers, timeout=30) as client,
            client.stream("GET", f"/v1/events{self._query}") as answer,
        ):
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    self.seen.append(json.loads(line[6:]))
                elif line.startswith("id: "):
                    self._last = max(self._last, int(line[4:]))

    async def reaches(self, last: int) -> None:
        """Wait until it has the event with this id."""
        async with asyncio.timeout(60):
            while not self.seen or self.seen[-1]["id"] < last:
                await asyncio.sleep(0.02)


async def kill_and_start(server: Server, bus: NatsServer | None, dice: Random) -> None:
    """Kill the server, and start it again; with a bus, kill that before and start it after, at a random distance."""
    if bus is not None:
        bus.kill()
        await asyncio.sleep(dice.uniform(0.1, 0.5))
    server.kill()
    await server.killed()
    await server.start()
    if bus is not None:
        await asyncio.sleep(dice.uniform(0.1, 0.5))
        bus.start()


async def events_of(server: Server) -> list[Json]:
    """Every event of the log."""
    async with server.client() as client:
        return [each.model_dump(mode="json", exclude_none=True) async for each in client.events(after=0, follow=False)]


async def delivered(bus: NatsServer, count: int) -> list[int]:
    """Return the ids of the events in the stream of NATS in their order, once it has that many."""
    client = await nats.connect(bus.url)
    try:
        stream = client.jetstream()
        async with asyncio.timeout(120):
            while (state := (await stream.stream_info(STREAM)).state).messages < count:
                await asyncio.sleep(0.05)
        found = [await stream.get_msg(STREAM, seq=number) for number in range(1, state.last_seq + 1)]
        return [int((each.headers or {})["Nats-Msg-Id"].partition("-")[2]) for each in found]
    finally:
        await client.close()
