from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

import pytest

from carrel.errors import PlatformError
from carrel.events import EventLog
from carrel.events import log as log_module
from carrel.events import tail as tail_module
from carrel.models.events import EVERYTHING, EventDraft, EventFilter, EventKind, kinds_of
from carrel.store import Database
from carrel.store.events import EventStore, stage

Open = Callable[[str], Awaitable[EventLog]]


def draft(context: str | None, number: int, kind: EventKind = EventKind.NOTICE, at: float = 1.0) -> EventDraft:
    return EventDraft(at, kind.value, context, "s", "n", f'{{"n":{number}}}')


async def read(log: EventLog, wanted: EventFilter, after: int, count: int) -> list[tuple[int, str]]:
    """Read until that many events have come."""
    found: list[tuple[int, str]] = []
    async with asyncio.timeout(30), aclosing(log.follow(wanted, after)) as pages:
        async for page in pages:
            assert page.missing is None
            found += [(event.id, event.body) for event in page.events]
            if len(found) >= count:
                return found
    raise AssertionError("the log ended")


async def test_a_reader_gets_old_and_new_events_in_order(log: EventLog) -> None:
    await log.append([draft("c", number) for number in range(3)])
    reading = asyncio.create_task(read(log, EVERYTHING, 0, 6))
    await log.append([draft("c", number) for number in range(3, 6)])
    found = await reading
    assert [id for id, _ in found] == [1, 2, 3, 4, 5, 6]
    assert [body for _, body in found] == [f'{{"n":{number}}}' for number in range(6)]
    assert await read(log, EVERYTHING, 4, 2) == found[4:]


async def test_a_reader_without_a_position_gets_only_new_events(log: EventLog) -> None:
    await log.append([draft("c", 0)])
    while await log.last() < 1:
        await asyncio.sleep(0.01)
    async with asyncio.timeout(30), aclosing(log.follow(EVERYTHING, None)) as pages:
        first = await anext(pages)
        assert (first.events, first.position) == ([], 1)
        await log.append([draft("c", 1)])
        assert [event.id for event in (await anext(pages)).events] == [2]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (EventFilter(context_id="c"), {0, 3}),
        (EventFilter(kinds=kinds_of(["command"])), {1}),
        (EventFilter(session_id="t"), set()),
        (EventFilter(contexts=frozenset({"d", "n:e"})), {1, 2}),
        (EventFilter(namespace="n"), {2}),
        (EventFilter(namespace="default"), {0, 1, 3}),
        (EVERYTHING, {0, 1, 2, 3, 4}),
    ],
)
async def test_filters_hold_in_the_store_and_in_memory(log: EventLog, wanted: EventFilter, expected: set[int]) -> None:
    events = [
        draft("c", 0),
        draft("d", 1, EventKind.COMMAND_ENDED),
        draft("n:e", 2),
        draft("c", 3),
        draft(None, 4),
    ]
    bodies = {f'{{"n":{number}}}' for number in expected}
    fence = EventFilter(context_id="fence")
    await log.append(events)
    await log.append([draft("fence", 9)])
    await read(log, fence, 0, 1)
    from_store = [page async for page in log.follow(wanted, 0, until=6)]
    assert {event.body for page in from_store for event in page.events} - {'{"n":9}'} == bodies
    async with asyncio.timeout(30), aclosing(log.follow(wanted, 6)) as pages, aclosing(log.follow(fence, 6)) as end:
        await anext(pages)
        await anext(end)
        await log.append([*events, draft("fence", 9)])
        await anext(end)
        live = [event.body for event in (log._tail.after(6) if log._tail else []) if wanted.matches(event)]
    assert set(live) - {'{"n":9}'} == bodies


async def test_events_of_overlapping_transactions_are_never_seen_out_of_order(
    database: Database, log: EventLog, another: Open, kind: str
) -> None:
    """Several servers write at once, and some transactions stay open for a while: no reader may pass an id that appears
    later.
    """
    other = await another("b") if kind == "postgresql" else log  # servers cannot share a file
    writers, each = 4, 40

    async def write(log: EventLog, writer: int) -> None:
        for number in range(each):
            await log.append([draft(f"w{writer}", number)])
            await asyncio.sleep(random.random() / 300)

    logs = (log, other)
    reading = [asyncio.create_task(read(each_log, EVERYTHING, 0, writers * each)) for each_log in logs]
    async with asyncio.timeout(60):
        await asyncio.gather(*[write(logs[writer % 2], writer) for writer in range(writers)])
        for seen in await asyncio.gather(*reading):
            assert [id for id, _ in seen] == [*range(1, writers * each + 1)]


@pytest.mark.parametrize("kind", ["postgresql"])
async def test_an_open_transaction_delays_no_other_event_and_loses_none(
    where: str, log: EventLog, database: Database
) -> None:
    import asyncpg

    connection = await asyncpg.connect(where)
    try:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(
            "INSERT INTO staged_events (at, kind, context_id, session_id, node, body) "
            "VALUES (1, 'notice', 'slow', 's', 'n', '{}')"
        )
        await log.append([draft("quick", 1)])
        assert await read(log, EVERYTHING, 0, 1) == [(1, '{"n":1}')]
        reading = asyncio.create_task(read(log, EVERYTHING, 1, 1))
        await transaction.commit()
        await log.append([draft("quick", 2)])
        both = await read(log, EVERYTHING, 1, 2)
        assert [id for id, _ in both] == [2, 3]
        assert (await reading)[0] == both[0]
    finally:
        await connection.close()


@pytest.mark.parametrize("kind", ["postgresql"])
async def test_a_first_reader_sees_the_events_of_other_servers_at_once(
    log: EventLog, another: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server was waiting for its own events only, and for a long time, when the reader came."""
    monkeypatch.setattr(log_module, "NUMBER_EVERY_S", 3600.0)
    other = await another("b")
    await asyncio.sleep(3 * log_module.POLL_S)
    reading = asyncio.create_task(read(other, EVERYTHING, 0, 1))
    while other.readers == 0:
        await asyncio.sleep(0)
    await log.append([draft("c", 1)])
    assert await reading == [(1, '{"n":1}')]


async def test_an_event_is_written_with_its_change_or_not_at_all(database: Database, store: EventStore) -> None:
    class Broken(Exception):
        pass

    def work(connection: object) -> None:
        stage(connection, [draft("c", 1)])  # type: ignore[arg-type]
        raise Broken

    with pytest.raises(Broken):
        await database.write(work)
    await database.write(lambda connection: stage(connection, [draft("c", 2)]))
    await store.number()
    assert [(event.id, event.body) for event in await store.page(EVERYTHING, 0, 10)] == [(1, '{"n":2}')]


async def test_staged_events_of_a_killed_server_get_their_ids(store: EventStore, another: Open) -> None:
    await store.append([draft("c", 1)])
    log = await another("b")
    assert await read(log, EVERYTHING, 0, 1) == [(1, '{"n":1}')]


async def test_a_slow_reader_reads_from_the_store_and_misses_nothing(
    log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_module, "MOST_EVENTS", 50)
    monkeypatch.setattr(log_module, "PAGE", 20)
    slow = log.follow(EVERYTHING, 0)
    async with asyncio.timeout(30), aclosing(slow):
        await anext(slow)
        for start in range(0, 400, 40):
            await log.append([draft("c", number) for number in range(start, start + 40)])
            await read(log, EVERYTHING, start, 40)
        assert log._tail is not None
        assert log._tail.start > 300
        found: list[int] = []
        async for page in slow:
            assert len(page.events) <= 20
            found += [event.id for event in page.events]
            if len(found) == 400:
                break
        assert found == [*range(1, 401)]


async def test_a_reader_is_told_what_retention_removed(log: EventLog, another: Open, store: EventStore) -> None:
    await log.append([draft("c", number, at=1.0 if number < 6 else 10**10) for number in range(10)])
    await read(log, EVERYTHING, 0, 10)
    assert await log.sweep() == 6
    async with asyncio.timeout(30):
        pages = [page async for page in log.follow(EVERYTHING, 2, until=10)]
    assert [page.missing for page in pages] == [6, None]
    assert [event.id for event in pages[1].events] == [7, 8, 9, 10]
    assert [page.missing async for page in log.follow(EVERYTHING, 6, until=10)] == [None]
    # A database that was restored: the reader knows ids that are yet to come.
    async with aclosing(log.follow(EVERYTHING, 500)) as ahead:
        page = await anext(ahead)
        assert (page.missing, page.position) == (10, 10)


async def test_retention_by_size_keeps_the_newest_and_ids_go_on(store: EventStore) -> None:
    await store.append([EventDraft(10**10, "notice", "c", None, "n", "x" * 100) for _ in range(50)])
    await store.number()
    assert await store.beyond(200 * 60) == 0
    assert await store.beyond(200 * 20) == 30
    assert await store.remove(30) == 30
    assert await store.remove(50) == 19, "the newest stays"
    assert await store.last() == 50
    await store.append([draft("c", 1)])
    await store.number()
    assert [event.id for event in await store.page(EVERYTHING, 0, 10)] == [50, 51]


async def test_retention_spares_what_a_bus_lacks(log: EventLog) -> None:
    await log.append([draft("c", number) for number in range(5)])
    await read(log, EVERYTHING, 0, 5)
    assert await log.sweep(delivered=2) == 2
    assert await log.sweep(delivered=5) == 2


async def test_a_forgotten_context_leaves_no_event(log: EventLog) -> None:
    await log.append([draft("secret", 1), draft("c", 2), draft("secret", 3)])
    async with asyncio.timeout(30), aclosing(log.follow(EVERYTHING, None)) as reader:
        await anext(reader)
        await log.append([draft("secret", 4), draft("c", 5)])
        await read(log, EVERYTHING, 0, 5)
        await log.forget("secret")
        told = '{"context":"secret"}'
        assert [body for _, body in await read(log, EVERYTHING, 0, 3)] == ['{"n":2}', '{"n":5}', told]


async def test_readers_end_with_the_server_and_everything_is_written(where: str) -> None:
    database = await Database.open(where)
    log = EventLog(EventStore(database), "a", keep_days=7, keep_bytes=2**30)
    await log.open()

    async def readers() -> AsyncIterator[int]:
        async for page in log.follow(EVERYTHING, 0):
            for event in page.events:
                yield event.id

    task = asyncio.create_task(anext(readers()))
    log.add([draft("c", number) for number in range(3)])
    async with asyncio.timeout(30):
        assert await task == 1
    log.add([draft("c", 3)])
    await log.close()
    with pytest.raises(PlatformError):
        log.add([draft("c", 4)])
    assert await EventStore(database).last() == 4
    await database.close()


async def test_only_one_server_delivers_to_a_bus(store: EventStore) -> None:
    assert await store.deliver("nats", "a", 60)
    assert not await store.deliver("nats", "b", 60)
    assert await store.set_delivered("nats", 7, "a")
    assert not await store.set_delivered("nats", 9, "b")
    await store.stop_delivering("nats", "a")
    assert await store.deliver("nats", "b", 0.0)
    assert await store.delivered("nats") == 7


async def test_an_event_that_cannot_be_told_is_lost_and_the_log_says_so(
    log: EventLog, caplog: pytest.LogCaptureFixture
) -> None:
    log.tell([draft("c", 1)])
    assert await read(log, EVERYTHING, 0, 1) == [(1, '{"n":1}')]
    await log.close()
    log.tell([draft("c", 2)])
    assert "1 events (notice) are lost: the event log is closed" in caplog.text


@pytest.mark.parametrize("kind", ["postgresql"])
async def test_a_reader_that_comes_from_another_server_is_ahead_of_this_one_and_misses_nothing(
    log: EventLog, another: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it saw last there is not in the memory of this server yet."""
    other = await another("b")
    async with asyncio.timeout(30), aclosing(other.follow(EVERYTHING, None)) as busy:
        await anext(busy)  # from now on the other server has the newest events in memory

        released = asyncio.Event()

        async def late() -> None:
            await released.wait()

        monkeypatch.setattr(other, "_read_new", late)
        await asyncio.sleep(0.2)
        await log.append([draft("c", number) for number in range(5)])
        assert [id for id, _ in await read(log, EVERYTHING, 0, 5)] == [1, 2, 3, 4, 5]
        assert other._tail is not None
        assert other._tail.last < 5
        async with aclosing(other.follow(EVERYTHING, 5)) as pages:
            first = await anext(pages)
            assert (first.missing, first.events, first.position) == (None, [], 5)
            monkeypatch.undo()
            released.set()
            await log.append([draft("c", 5)])
            assert [event.id for event in (await anext(pages)).events] == [6], "none twice"


async def test_an_id_of_another_log_is_noticed(log: EventLog) -> None:
    await log.append([draft("c", 1)])
    while await log.last() < 1:
        await asyncio.sleep(0.01)
    async with asyncio.timeout(30), aclosing(log.follow(EVERYTHING, 99)) as pages:
        assert (await anext(pages)).missing == 1


async def test_a_reader_of_a_quiet_context_is_told_that_it_lives_while_others_are_busy(log: EventLog) -> None:
    async def busy() -> None:
        number = 0
        while True:
            number += 1
            await log.append([draft("busy", number)])
            await asyncio.sleep(0.01)

    working = asyncio.create_task(busy())
    try:
        async with (
            asyncio.timeout(10),
            aclosing(log.follow(EventFilter(context_id="quiet"), 0, beat_s=0.2)) as pages,
        ):
            positions = [(await anext(pages)).position for _ in range(4)]
        assert positions == sorted(positions)
        assert positions[-1] > positions[0], "its position moves past what was not for it"
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def test_who_waits_when_the_log_closes_without_a_database_is_told(where: str) -> None:
    class Away(EventStore):
        async def append(self, drafts: object) -> None:
            raise PlatformError("the database is away")

    database = await Database.open(where)
    log = EventLog(Away(database), "a", keep_days=7, keep_bytes=2**30)
    await log.open()
    many = [draft("c", number) for number in range(log_module.MAX_BATCH - 1)]
    waiting = [asyncio.create_task(log.append(many)) for _ in range(4)]
    log.add(many)
    await asyncio.sleep(0)
    await log.close()
    async with asyncio.timeout(10):
        ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(end) for end in ends] == [PlatformError] * 4
    await database.close()


async def test_an_event_beside_the_start_of_the_first_reader_is_not_missed(where: str) -> None:
    class Slow(EventStore):
        """Something happens, and is noticed, between the question for the newest event and the answer."""

        asked = False

        async def last(self) -> int:
            found = await super().last()
            if not self.asked:
                self.asked = True
                await self.append([draft("c", 0)])
                while self.staged.is_set():
                    await asyncio.sleep(0.001)
            return found

    database = await Database.open(where)
    log = EventLog(Slow(database), "a", keep_days=7, keep_bytes=2**30)
    await log.open()
    try:
        async with asyncio.timeout(10):
            assert await read(log, EVERYTHING, 0, 1) == [(1, '{"n":0}')]
    finally:
        await log.close()
        await database.close()
