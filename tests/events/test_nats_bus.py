from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager

import nats
import pytest
from tests.support.nats import NatsServer

from carrel.events import EventLog
from carrel.events.nats_bus import BUS, STREAM, NatsBus, subject_of
from carrel.models.events import EVERYTHING, EventDraft, EventKind, StoredEvent
from carrel.store import Database
from carrel.store.events import EventStore


@pytest.fixture
def server() -> Iterator[NatsServer]:
    server = NatsServer()
    yield server
    server.close()


@asynccontextmanager
async def delivering(where: str, url: str, node: str = "a") -> AsyncIterator[tuple[EventLog, EventStore, NatsBus]]:
    database = await Database.open(where)
    store = EventStore(database)
    log = EventLog(store, node, keep_days=7, keep_bytes=2**30)
    await log.open()
    bus = NatsBus(url, log, store, node, keep_s=7 * 86_400)
    bus.start()
    try:
        yield log, store, bus
    finally:
        await bus.close()
        await log.close()
        await database.close()


def drafts(start: int, count: int, kind: EventKind = EventKind.NOTICE) -> list[EventDraft]:
    return [EventDraft(1.0, kind.value, "c", None, "n", json.dumps({"n": n})) for n in range(start, start + count)]


async def streamed(url: str, count: int) -> list[tuple[str, int]]:
    """The subjects and ids of the messages of the stream, once it has that many."""
    async with asyncio.timeout(60):
        while True:
            try:
                client = await nats.connect(url, allow_reconnect=False)
                try:
                    stream = client.jetstream()
                    state = (await stream.stream_info(STREAM)).state
                    if state.messages >= count:
                        found = [await stream.get_msg(STREAM, seq=seq) for seq in range(1, state.last_seq + 1)]
                        return [(str(each.subject), json.loads(each.data or b"{}")["id"]) for each in found]
                finally:
                    await client.close()
            except (nats.errors.Error, nats.js.errors.NotFoundError, OSError):
                pass
            await asyncio.sleep(0.05)


async def test_events_and_logs_have_subjects_and_come_in_order(where: str, server: NatsServer) -> None:
    async with delivering(where, server.url) as (log, store, bus):
        await log.append(drafts(0, 2))
        await log.append(drafts(2, 1, EventKind.LOG))
        assert await streamed(server.url, 3) == [("events.agent.c", 1), ("events.agent.c", 2), ("logs.agent.c", 3)]
        async with asyncio.timeout(30):
            while await store.delivered(BUS) < 3:
                await asyncio.sleep(0.02)
        assert bus.behind == 0


def test_a_dot_in_a_context_separates_no_subject() -> None:
    assert subject_of(StoredEvent(1, 1.0, "notice", "a.b", None, "n", "{}")) == "events.agent.a%2Eb"
    assert subject_of(StoredEvent(1, 1.0, "notice", None, "sbx-1", "n", "{}")) == "events.agent.sbx-1"
    assert subject_of(StoredEvent(1, 1.0, "notice", None, None, "n", "{}")) == "events.agent._"


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_kills_of_nats_under_load_delay_events_and_lose_none(where: str, server: NatsServer) -> None:
    total = 0
    async with delivering(where, server.url) as (log, _, bus):
        for _round in range(3):
            for _ in range(10):
                await log.append(drafts(total, 40))
                total += 40
                if _ == 5:
                    server.kill()
            async with asyncio.timeout(30):
                while bus.behind == 0:  # it knows that the stream lacks events
                    await asyncio.sleep(0.02)
            server.start()
        assert [id for _, id in await streamed(server.url, total)] == [*range(1, total + 1)]


async def test_a_killed_server_goes_on_where_the_stream_ends(where: str, server: NatsServer) -> None:
    """The saved position is behind the stream, as after a kill between the two."""
    async with delivering(where, server.url) as (log, store, _):
        await log.append(drafts(0, 5))
        await streamed(server.url, 5)
        await store.set_delivered(BUS, 2, "a")
    async with delivering(where, server.url, "b") as (log, store, _):
        await log.append(drafts(5, 3))
        assert [id for _, id in await streamed(server.url, 8)] == [*range(1, 9)]


async def test_what_the_stream_lost_is_delivered_again(where: str, server: NatsServer) -> None:
    async with delivering(where, server.url) as (log, _, _bus):
        await log.append(drafts(0, 5))
        await streamed(server.url, 5)
    client = await nats.connect(server.url)
    await client.jetstream().delete_stream(STREAM)
    await client.close()
    async with delivering(where, server.url) as (log, _, _bus):
        assert [id for _, id in await streamed(server.url, 5)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", ["postgresql"])
async def test_of_two_servers_one_delivers_and_the_other_takes_over(where: str, server: NatsServer) -> None:
    async with delivering(where, server.url, "b") as (other, _, _other):
        async with delivering(where, server.url, "a") as (log, _, _bus):
            await asyncio.gather(log.append(drafts(0, 50)), other.append(drafts(50, 50)))
            await streamed(server.url, 100)
        await other.append(drafts(100, 10))
        assert [id for _, id in await streamed(server.url, 110)] == [*range(1, 111)]


async def test_a_stream_of_others_is_refused(where: str, server: NatsServer, caplog: pytest.LogCaptureFixture) -> None:
    client = await nats.connect(server.url)
    await client.jetstream().add_stream(name=STREAM, subjects=["theirs"])
    await client.close()
    async with delivering(where, server.url) as (log, store, _), aclosing(log.follow(EVERYTHING, 0)) as reader:
        await log.append(drafts(0, 1))
        async with asyncio.timeout(30):
            while "lacks the subjects" not in caplog.text:
                await asyncio.sleep(0.02)
            assert (await anext(reader)).events, "readers need no bus"
        assert await store.delivered(BUS) == 0


async def test_a_bus_that_never_was_there_is_named_without_its_password(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with delivering(where, "nats://user:hush-hush@127.0.0.1:9") as (log, _, bus):
        await log.append(drafts(0, 3))
        async with asyncio.timeout(30):
            while bus.behind != 3:
                await asyncio.sleep(0.02)
            await log.append(drafts(3, 1))
            while bus.behind != 4:  # it has tried once more
                await asyncio.sleep(0.02)
    assert caplog.text.count("events cannot be delivered to NATS on 127.0.0.1:9") == 1
    assert "hush" not in caplog.text
