"""Streams of events under failure, on a real server: NATS is away under load, and readers stop reading.

`CARREL_BUS_AWAY_S=30` keeps NATS away for longer.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.end_to_end.test_event_kills import CONTEXT, Work
from tests.support.kill_events import Reader, delivered, events_of
from tests.support.kill_server import Server
from tests.support.nats import NatsServer

AWAY_S = float(os.environ.get("CARREL_BUS_AWAY_S", "5"))
STUCK = 20
RECORDS, RECORD = 4000, 5000
MOST_GROWTH = 120 << 20
"""What the server may grow: far less than the events that the readers do not read (400 MB)."""


@pytest.fixture(autouse=True)
def _forks(carrel_forks: None) -> None: ...


@pytest.fixture
def bus() -> Iterator[NatsServer]:
    server = NatsServer()
    yield server
    server.close()


@pytest.mark.parametrize("away", ["killed", "frozen"])
async def test_work_goes_on_while_nats_is_away_and_its_stream_catches_up(bus: NatsServer, away: str) -> None:
    server = Server(None, "directory", settings={"CARREL_BUS": bus.url})
    reader, work = Reader(server), Work(server)
    try:
        await server.start()
        running = [asyncio.create_task(each) for each in (reader.run(), work.commands(1), work.records())]
        async with asyncio.timeout(60):
            while len(work.ran) < 10:
                await asyncio.sleep(0.02)
        await delivered(bus, 10)
        bus.kill() if away == "killed" else bus.freeze()
        before, seen = len(work.ran), len(reader.seen)
        await asyncio.sleep(AWAY_S)
        done, told = len(work.ran) - before, len(reader.seen) - seen
        bus.start() if away == "killed" else bus.thaw()
        assert done >= 2 * AWAY_S, f"{done} commands in {AWAY_S} s without NATS"
        assert told >= 2 * done, "readers are told meanwhile that commands start and end"
        await asyncio.sleep(0.5)  # and with NATS again
        for task in running[1:]:
            task.cancel()
        await asyncio.gather(*running[1:], return_exceptions=True)
        async with asyncio.timeout(60):
            now = await events_of(server)
            while (later := await events_of(server)) != now:
                now = later
                await asyncio.sleep(0.3)
        ids = [each["id"] for each in now]
        assert ids == [*range(1, len(ids) + 1)]
        sent = await delivered(bus, len(ids))  # maybe more, which happened since
        assert sent[: len(ids)] == ids and sent == [*range(1, len(sent) + 1)], "all, once, in order"
        running[0].cancel()
        await asyncio.gather(running[0], return_exceptions=True)
        assert reader.breaks == 0, "no stream broke"
        await server.stop()
    finally:
        server.close()


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_readers_that_stop_reading_cost_little_memory() -> None:
    server = Server(None, "directory")
    try:
        await server.start()
        about = json.loads((server.data / "server.json").read_bytes())
        token = (server.data / "token").read_text().strip()
        where = urlsplit(about["url"])
        head = f"GET /v1/events?after=0 HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n\r\n"
        text = "x" * RECORD
        with ExitStack() as stack:
            async with server.client() as client:
                await client.publish_log([{"message": text}] * 100, context=CONTEXT)  # what the first ones import
                before = resident(server.pid)
                for _ in range(STUCK):
                    reader = stack.enter_context(socket.socket())
                    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                    reader.connect((where.hostname, where.port))
                    reader.sendall(head.encode())
                    reader.settimeout(30)
                    assert reader.recv(20, socket.MSG_WAITALL).startswith(b"HTTP/1.1 200")
                most = 0
                for _ in range(RECORDS // 100):
                    await client.publish_log([{"message": text}] * 100, context=CONTEXT)
                    most = max(most, resident(server.pid) - before)
                await client.sandbox(CONTEXT)  # it works as before
                most = max(most, resident(server.pid) - before)
        print(f"{STUCK} readers that do not read: {most / 1e6:.0f} MB")
        assert most < MOST_GROWTH
        await server.stop()
    finally:
        server.close()
