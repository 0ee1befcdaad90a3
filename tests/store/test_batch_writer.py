"""The process that writes for all workers, here in the process of the test, with its own connection to the database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.store.test_audit import record

from carrel.errors import Conflict, DatabaseUnavailable
from carrel.models.events import EventDraft
from carrel.store import Database
from carrel.store import batch_writer as module
from carrel.store.audit import AuditStore
from carrel.store.batch_writer import BatchesThere, Writer
from carrel.store.batches import Batch
from carrel.store.database import Workers
from carrel.store.events import EventStore


class Parts:
    """A writer that can be replaced, and two workers."""

    def __init__(self, path: Path):
        self.socket = str(path / "writer.sock")
        self.where = str(path / "carrel.db")
        self.turns = str(path / "turns")
        self.writer: Writer | None = None
        self.databases: list[Database] = []
        self.workers: list[BatchesThere] = []

    async def open(self) -> None:
        self.databases = [await self.database(writer=True), await self.database(), await self.database()]
        self.workers = [BatchesThere(database, self.socket) for database in self.databases[1:]]
        await self.start()

    async def database(self, *, writer: bool = False) -> Database:
        return await Database.open(self.where, Workers(self.turns, 2, lambda _: None, writer=writer))

    async def start(self) -> None:
        self.writer = Writer(self.databases[0])
        await self.writer.listen(self.socket)

    async def close(self) -> None:
        for each in self.workers:
            each.close()
        if self.writer is not None:
            await self.writer.close()
        for database in self.databases:
            await database.close()


@pytest.fixture
async def parts(tmp_path: Path) -> AsyncIterator[Parts]:
    parts = Parts(tmp_path)
    await parts.open()
    yield parts
    await parts.close()


def batch(chain: str, seq: int) -> Batch:
    happened = EventDraft(float(seq), "command.ended", chain, None, "n", f"{chain} {seq}")
    return [record(chain, seq)], [], [], [happened]


async def test_records_of_all_workers_keep_their_order_and_events_have_no_gap(parts: Parts) -> None:
    async def work(worker: BatchesThere, chain: str) -> None:
        for seq in range(1, 21):
            await worker.write(batch(chain, seq))

    await asyncio.gather(*(work(worker, f"{name}") for name, worker in zip("ab", parts.workers, strict=True)))
    store, events = AuditStore(parts.databases[1], parts.workers[0]), EventStore(parts.databases[1])
    for chain in "ab":
        assert [seq for seq, _, _ in await store.records(chain, until=99, limit=99)] == list(range(1, 21))
    assert await events.last() == 40
    assert parts.databases[1].staged.is_set() and parts.databases[2].staged.is_set()


async def test_one_that_is_refused_refuses_no_other(parts: Parts) -> None:
    await parts.workers[0].write(batch("a", 1))
    answers = await asyncio.gather(
        parts.workers[0].write(batch("a", 1)),
        parts.workers[1].write(batch("b", 1)),
        return_exceptions=True,
    )
    assert isinstance(answers[0], Conflict) and answers[1] is None
    store = AuditStore(parts.databases[1], parts.workers[0])
    assert await store.tip("b") == (1, b"h1", 0) and await EventStore(parts.databases[1]).last() == 2


async def test_a_writer_that_dies_loses_nothing_that_was_answered(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert parts.writer is not None
    worker = parts.workers[0]
    await worker.write(batch("a", 1))
    monkeypatch.setattr(module, "RETURNS_WITHIN_S", 0.02)
    await parts.writer.close()
    with pytest.raises(DatabaseUnavailable) as caught:
        for seq in (2, 2):  # the first may still be on the old connection
            await worker.write(batch("a", seq))
    assert caught.value.extra["retry"] is True
    monkeypatch.setattr(module, "RETURNS_WITHIN_S", 10.0)
    waiting = asyncio.create_task(worker.write(batch("a", 2)))
    await asyncio.sleep(0)
    await parts.start()
    await waiting
    assert (await AuditStore(parts.databases[1], worker).tip("a"))[0] == 2


async def test_what_is_no_batch_ends_the_connection_alone(parts: Parts) -> None:
    reader, writer = await asyncio.open_unix_connection(parts.socket)
    writer.write(b"\xff\xff\xff\xff")
    assert await reader.read() == b""
    writer.close()
    await parts.workers[0].write(batch("a", 1))
