from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import text
from tests.support.no_events import no_event

from carrel.audit import AuditEntry, AuditLog, Ending, Filter, SigningKey, Verification, chain_of, server_chain, verify
from carrel.errors import DatabaseUnavailable, InvalidRequest, PlatformError
from carrel.store import Database
from carrel.store.audit import AuditStore
from carrel.store.batches import Batch, BatchesHere

CHAIN = chain_of("c")
ENTRY = AuditEntry(CHAIN, "agent:a", "shell", "run_command", arguments={"command": "ls"})


@asynccontextmanager
async def opened(store: AuditStore, key: SigningKey, node: str = "n", **settings: object) -> AsyncIterator[AuditLog]:
    log = AuditLog(store, key, node, no_event, **settings)  # type: ignore[arg-type]
    await log.open()
    try:
        yield log
    finally:
        await log.close()


async def bodies(store: AuditStore, chain: str = CHAIN) -> list[dict[str, object]]:
    return [json.loads(body) for _, _, body in await store.records(chain, until=10**9, limit=10**6)]


async def checked(log: AuditLog, **settings: object) -> Verification:
    data = b"".join([piece async for piece in log.export()])
    verdict = verify(io.BytesIO(data), keys=[log.key.public])
    assert verdict.ok, verdict.broken
    return verdict


async def test_a_begin_is_there_before_anything_is_done(store: AuditStore, key: SigningKey) -> None:
    async with opened(store, key, flush_s=3600) as log:
        ticket = await log.begin(replace(ENTRY, arguments_hash=log.hash_arguments({"command": "ls -l"})))
        [begin] = await bodies(store)
        assert (begin["type"], begin["seq"], begin["node"]) == ("begin", 1, "n") and ticket.seq == 1
        ticket.end(Ending("ok", 1.5, 2, 3))
        ticket.end(Ending("again"))
        assert len(await bodies(store)) == 1, "an end waits for company"
        await log.flush()
        end = (await bodies(store))[1]
        assert (end["type"], end["ref"], end["result"], end["bytes_out"]) == ("end", 1, "ok", 3)
        second = await log.begin(ENTRY)
        second.end()
    assert [body["type"] for body in await bodies(store)] == ["begin", "end", "begin", "end"], "closing writes it"
    assert await store.unclean("n") == []


async def test_an_end_is_written_soon_by_itself(store: AuditStore, key: SigningKey) -> None:
    async with opened(store, key) as log:
        (await log.begin(ENTRY)).end()
        async with asyncio.timeout(30):
            while len(await bodies(store)) < 2:
                await asyncio.sleep(0.005)


async def test_many_at_once_share_transactions_and_keep_their_order(store: AuditStore, key: SigningKey) -> None:
    async with opened(store, key, head_records=100) as log:
        written = 0
        append = store.append

        async def counted(*args: object, **named: object) -> None:
            nonlocal written
            written += 1
            await append(*args, **named)  # type: ignore[arg-type]

        store.append = counted  # type: ignore[method-assign]

        async def work(number: int) -> None:
            for _ in range(4):
                ticket = await log.begin(replace(ENTRY, chain=chain_of(f"c{number % 3}")))
                ticket.end()
            log.record(replace(ENTRY, decision="deny", rule="shell(rm:*)"), Ending("denied_by_policy"))

        await asyncio.gather(*(work(number) for number in range(90)))
        await log.flush()
        assert written < 90
        verdict = await checked(log)
        assert (verdict.chains, verdict.records, verdict.open, verdict.unsigned) == (4, 90 * 9, 0, 0)
        assert verdict.heads >= 3 * 2 + 1


async def test_whoever_goes_while_it_is_written_leaves_no_open_operation(store: AuditStore, key: SigningKey) -> None:
    async with opened(store, key) as log:
        for turns in range(12):
            task = asyncio.ensure_future(log.begin(ENTRY))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            try:
                (await task).end()
            except asyncio.CancelledError:
                pass
        await log.flush()
        await log.flush()
        assert (await checked(log)).open == 0
    ended = {body["result"] for body in await bodies(store) if body["type"] == "end"}
    assert ended <= {"cancelled", "ok"}


@pytest.mark.parametrize("kind", ["sqlite"])
@pytest.mark.parametrize("strict", [True, False])
async def test_nothing_may_be_done_while_nothing_can_be_written(
    where: str, database: Database, store: AuditStore, key: SigningKey, strict: bool, kind: str
) -> None:
    async with opened(store, key, strict=strict, flush_s=0.001) as log:
        running = await log.begin(ENTRY)
        await log.flush()
        await database.write(lambda connection: connection.execute(text("PRAGMA busy_timeout=20")).close())
        other = sqlite3.connect(where, isolation_level=None)
        try:
            other.execute("BEGIN IMMEDIATE")
            running.end()
            if strict:
                for _ in range(2):
                    with pytest.raises(PlatformError, match="no operation may run"):
                        await log.begin(ENTRY)
            else:
                refused: list[PlatformError] = []

                async def ask() -> None:
                    try:
                        (await log.begin(ENTRY)).end()
                    except PlatformError as error:
                        refused.append(error)

                async with asyncio.timeout(30):
                    while not refused:
                        await ask()
                        await asyncio.sleep(0.005)
            with pytest.raises(PlatformError):
                await log.flush()
            other.execute("ROLLBACK")
        finally:
            other.close()
        await log.flush()
        (await log.begin(ENTRY)).end()
        assert (await checked(log)).open == 0, "what had ended meanwhile is written now"


async def test_batched_does_not_wait(store: AuditStore, key: SigningKey) -> None:
    async with opened(store, key, strict=False, flush_s=3600) as log:
        tickets = [await log.begin(ENTRY) for _ in range(3)]
        for ticket in tickets[1:]:
            ticket.end()
        assert await bodies(store) == []
        await log.flush()
        tickets[0].end()
    assert [(body["type"], body.get("ref")) for body in await bodies(store)] == [
        ("begin", None), ("begin", None), ("begin", None), ("end", 2), ("end", 3), ("end", 1),
    ]  # fmt: skip


async def test_heads_come_by_themselves(store: AuditStore, key: SigningKey) -> None:
    async with opened(store, key, head_s=0.05) as log:
        ticket = await log.begin(ENTRY)
        async with asyncio.timeout(30):
            while not (heads := await store.heads(CHAIN)):
                await asyncio.sleep(0.005)
        assert heads[0][1] == 1 and len(await store.unclean("n")) == 1, "signed, but an operation is open"
        ticket.end()
        async with asyncio.timeout(30):
            while len(heads := await store.heads(CHAIN)) < 2:
                await asyncio.sleep(0.005)
        assert [head[3] for head in heads] == [1, 1] and await store.unclean("n") == []


class Unsure:
    """Writes batches, but loses an answer: before it wrote, or after."""

    def __init__(self, database: Database):
        self._here = BatchesHere(database)
        self.lose: str | None = None

    async def write(self, batch: Batch) -> None:
        lose, self.lose = self.lose, None
        if lose != "before":
            await self._here.write(batch)
        if lose is not None:
            raise DatabaseUnavailable("the answer was lost", retry=True)


@pytest.mark.parametrize("lose", ["before", "after"])
async def test_a_lost_answer_loses_no_record_and_writes_none_twice(
    database: Database, key: SigningKey, lose: str
) -> None:
    unsure = Unsure(database)
    store = AuditStore(database, unsure)
    async with opened(store, key, flush_s=3600) as log:
        first = await log.begin(ENTRY)
        first.end(Ending("ok", 1.0))
        unsure.lose = lose
        with pytest.raises(DatabaseUnavailable) as caught:
            await log.begin(ENTRY)
        assert caught.value.extra["retry"] is True
        (await log.begin(ENTRY)).end()
        await log.flush()
        await log.flush()
        assert (await checked(log)).open == 0
    found = [(body["type"], body.get("ref"), body.get("result")) for body in await bodies(store)]
    wanted = [("begin", None, None), ("end", 1, "ok"), ("begin", None, None)]
    if lose == "after":  # the one whose caller was told that it must not run was not dispatched
        wanted += [("begin", None, None), ("end", 3, "cancelled"), ("end", 4, "ok")]
    else:
        wanted += [("end", 3, "ok")]
    assert found == wanted


async def test_what_a_killed_server_left_open_is_closed_and_told(where: str, store: AuditStore, tmp_path: Path) -> None:
    program = """
import asyncio, os, sys
from carrel.audit import AuditEntry, AuditLog, SigningKey, chain_of
from carrel.store import Database
from carrel.store.audit import AuditStore
from carrel.store.batches import BatchesHere
no_event = lambda *_: ()
async def main():
    database = await Database.open(sys.argv[1])
    log = AuditLog(AuditStore(database, BatchesHere(database)), SigningKey.load(sys.argv[2]), "n", no_event, head_records=5)
    assert await log.open() == []
    slow = await log.begin(AuditEntry(chain_of("c"), "agent:a", "shell", "slow"))
    for number in range(9):
        (await log.begin(AuditEntry(chain_of(f"c{number % 2}"), "agent:a", "shell", "quick"))).end()
        (await log.begin(AuditEntry(chain_of("c"), "agent:a", "shell", "quick"))).end()
    await log.flush()
    other = await log.begin(AuditEntry(chain_of(None, "s"), "agent:b", "file", "read"))
    print("ready", flush=True)
    os.read(0, 1)
asyncio.run(main())
"""
    command = (sys.executable, "-c", program, where, str(tmp_path))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    process._transport.close()  # type: ignore[attr-defined]
    log = AuditLog(store, SigningKey.load(str(tmp_path)), "n", no_event)
    found = sorted(await log.open(), key=lambda each: each.name)
    try:
        assert [(each.name, each.actor, each.chain, each.seq) for each in found] == [
            ("read", "agent:b", "sandbox:s", 1),
            ("slow", "agent:a", "context:c", 1),
        ]
        ends = [body for body in await bodies(store) if body["type"] == "end" and body["ref"] == 1]
        assert [(end["result"], end["reason"]) for end in ends] == [("unknown", "the server ended")]
        assert (await checked(log)).open == 0
        shown = await log.search(Filter(result="unknown"))
        assert {item.name for item in shown.items} == {"read", "slow"}
    finally:
        await log.close()
    again = AuditLog(store, SigningKey.load(str(tmp_path)), "n", no_event)
    assert await again.open() == [] and await store.unclean("n") == []
    await again.close()


async def test_a_chain_moves_with_its_session(where: str, key: SigningKey, tmp_path: Path) -> None:
    databases = [await Database.open(where), await Database.open(where)]
    stores = [AuditStore(database, BatchesHere(database)) for database in databases]
    other_key = SigningKey.load(str(tmp_path))
    try:
        async with opened(stores[0], key, "a") as first, opened(stores[1], other_key, "b") as second:
            lost = await first.begin(ENTRY)
            (await first.begin(ENTRY)).end()
            await first.flush()
            [left] = await second.adopt(CHAIN)
            assert (left.seq, left.name) == (1, "run_command")
            assert await second.adopt(CHAIN) == [] and await second.adopt("context:absent") == []
            mine = await second.begin(ENTRY)
            assert await second.adopt(CHAIN) == [], "its own open operations are not lost"
            mine.end()
            lost.end()  # too late, but it happened: it is written where the chain ends now
            (await first.begin(ENTRY)).end()
            await first.flush()
            await second.flush()
        data = b"".join([piece async for piece in AuditLog(stores[0], key, "a", no_event).export([])])
        assert verify(io.BytesIO(data)).ok
        async with opened(stores[0], key, "a") as first:
            data = b"".join([piece async for piece in first.export()])
        verdict = verify(io.BytesIO(data), keys=[key.public, other_key.public])
        assert verdict.ok and verdict.open == 0 and verdict.unsigned == 0, verdict
        assert set(verdict.keys) == {key.public, other_key.public}
        assert [body["seq"] for body in await bodies(stores[0])] == list(range(1, verdict.records + 1))
    finally:
        for database in databases:
            await database.close()


async def test_what_a_server_left_open_is_found_though_another_wrote_to_the_chain(where: str, key: SigningKey) -> None:
    databases = [await Database.open(where), await Database.open(where)]
    stores = [AuditStore(database, BatchesHere(database)) for database in databases]
    try:
        async with opened(stores[1], key, "b") as other:
            killed = AuditLog(stores[0], key, "a", no_event)
            await killed.open()
            await killed.begin(replace(ENTRY, name="slow"))
            (await other.begin(replace(ENTRY, name="decide_approval"))).end()
            await other.seal()
            running = await other.begin(replace(ENTRY, name="running"))
            assert killed._task is not None
            killed._task.cancel()
            again = AuditLog(stores[0], key, "a", no_event)
            assert [each.name for each in await again.open()] == ["slow"], "and not what runs on the other"
            await again.close()
            running.end()
            await other.flush()
            assert (await checked(other)).open == 0
        assert await stores[0].unclean("a") == await stores[0].unclean("b") == []
    finally:
        for database in databases:
            await database.close()


async def test_two_servers_never_fork_a_chain(where: str, key: SigningKey) -> None:
    databases = [await Database.open(where), await Database.open(where)]
    try:
        async with (
            opened(AuditStore(databases[0], BatchesHere(databases[0])), key, "a", head_records=7) as first,
            opened(AuditStore(databases[1], BatchesHere(databases[1])), key, "b", head_records=7) as second,
        ):

            async def work(log: AuditLog) -> None:
                for _ in range(5):
                    (await log.begin(ENTRY)).end()

            await asyncio.gather(*(work(log) for log in (first, second) for _ in range(5)))
            await first.flush()
            await second.flush()
            verdict = await checked(first)
            assert (verdict.records, verdict.open) == (100, 0)
    finally:
        for database in databases:
            await database.close()


async def test_old_records_go_and_the_rest_still_verifies(store: AuditStore, key: SigningKey) -> None:
    now = 1000.0
    async with opened(store, key, head_records=4, clock=lambda: now) as log:
        other, gone = replace(ENTRY, chain=chain_of("d")), replace(ENTRY, chain=chain_of(None, "box"))
        for entry in (ENTRY, ENTRY, ENTRY, other, gone):
            (await log.begin(entry)).end()
        await log.seal()
        before = await checked(log)
        now = 2000.0
        running = await log.begin(other)
        (await log.begin(ENTRY)).end()
        assert await log.prune(999.0) == 0
        assert await log.prune(1000.0) == 6 + 2 + 2, "what ended before an operation that still runs goes too"
        verdict = await checked(log)
        assert verdict.pruned == 2 and gone.chain not in verdict.tips and server_chain("n") in verdict.tips
        assert [body["seq"] for body in await bodies(store)] == [7, 8]
        pruned = await log.search(Filter(chain=server_chain("n"), name="prune_audit"))
        assert {item.arguments["chain"] for item in pruned.items} == {CHAIN, other.chain, gone.chain}
        now = 3000.0
        assert await log.prune(2000.0, "person:ann") == 2 + 3, "what tells of the first pruning has its time too"
        [told] = (await log.search(Filter(actor="person:ann", name="prune_audit"), limit=1)).items
        assert told.arguments["records"] in {2, 3}
        assert [body["seq"] for body in await bodies(store, other.chain)] == [3], "it runs still"
        running.end()
        await log.flush()
        assert await log.prune(3000.0) > 0
        assert (await bodies(store, other.chain)) == []
        assert (await checked(log)).pruned >= 2
        (await log.begin(ENTRY)).end()
        (await log.begin(gone)).end()
        await log.flush()
        assert [body["seq"] for body in await bodies(store, gone.chain)] == [1, 2]
        data = b"".join([piece async for piece in log.export([CHAIN, other.chain])])
        tips = {name: tip for name, tip in before.tips.items() if name != gone.chain}
        assert verify(io.BytesIO(data), tips=tips).ok, "what was there before is still what it was"
    async with opened(store, key, clock=lambda: now) as log:
        now = 9000.0
        assert await log.prune(8000.0) > 0
        assert (await checked(log)).chains == 3, "even an empty chain knows where it ends"
        (await log.begin(ENTRY)).end()
        await checked(log)


async def test_what_cannot_be_written_keeps_nothing_else_from_it(store: AuditStore, key: SigningKey) -> None:
    async with opened(store, key, flush_s=0.001) as log:
        running = await log.begin(ENTRY)
        nonsense = replace(ENTRY, actor=None)  # type: ignore[arg-type]
        with pytest.raises(PlatformError, match="while encoding the record"):
            await log.begin(nonsense)
        log.record(nonsense, Ending())
        running.end()
        await log.flush()
        (await log.begin(ENTRY)).end()
        verdict = await checked(log)
        assert (verdict.records, verdict.open) == (4, 0)


async def test_what_cannot_be_a_chain_is_refused(store: AuditStore, key: SigningKey) -> None:
    async with opened(store, key) as log:
        for name in ("context:ü", "context:a\nb", "context:" + "x" * 300):
            with pytest.raises(InvalidRequest):
                await log.begin(replace(ENTRY, chain=name))
    with pytest.raises(PlatformError, match="closed"):
        await log.begin(ENTRY)
    await log.close()
