"""The audit log: appending records, searching a million records, verifying an export.

`CARREL_BENCH_RECORDS` reduces the number of records. The million records are written directly into the tables, linked
as the log would link them: 500 chains, 40 actors, mostly commands, a few refusals and failures. No peer does the same.
"""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from bench import ground
from bench.measure import BenchFailed, Contender, Progress, Report, Table, median, percentile, rounds
from carrel.audit import AuditEntry, AuditLog, Ending, Filter, SigningKey, chain_of, verify
from carrel.audit.records import RecordRow, genesis, link, row
from carrel.store import Database
from carrel.store.audit import AuditStore

RECORDS = int(os.environ.get("CARREL_BENCH_RECORDS", "1000000"))
CHAINS = 500
SHAPES = 13_000
CALLERS = 200
EACH = 75
SINGLES = 300
ROUNDS = 15
EXPORTED = 100
STEPS = 5
BEGAN = 1_700_000_000.0
NAMES = ("run_command", "start_command", "read", "write", "list", "get_command_output", "edit", "deploy_or_resume")


def no_event(*_: object) -> tuple[()]:
    """Only the log is measured."""
    return ()


async def run(progress: Progress) -> Report:
    """Measure."""
    async with ground.scratch() as place:
        key = SigningKey.load(str(place))
        appended, strict, batched = await _append(place, key)
        progress(1, STEPS)
        await asyncio.to_thread(_fill, await _empty(place / "full.db"))
        progress(2, STEPS)
        database = await Database.open(str(place / "full.db"))
        log = AuditLog(AuditStore(database), key, "bench", no_event)
        await log.open()
        try:
            found = await _searches(log)
            progress(3, STEPS)
            records, verified = await _verify(log, place / "export.jsonl", progress)
        finally:
            await log.close()
            await database.close()
    progress(STEPS, STEPS)
    searches = Table(f"a search among {RECORDS:,} records, {ROUNDS} rounds", ("", "median ms", "p95 ms"))
    for name, samples in found.items():
        searches.add(name, median(samples) * 1e3, percentile(samples, 95) * 1e3)
    table = Table("the audit log", ("", ""))
    table.add(f"records appended a second, {CALLERS} callers", appended)
    table.add("ms an operation waits, strict", median(strict) * 1e3)
    table.add("ms an operation waits, batched", median(batched) * 1e3)
    table.add(f"records verified a second, of {records:,}", verified)
    return Report(
        {
            "audit_append_per_s": appended,
            "audit_begin_ms": median(strict) * 1e3,
            "audit_begin_batched_ms": median(batched) * 1e3,
            "audit_search_ms": max(median(samples) for samples in found.values()) * 1e3,
            "audit_verify_per_s": verified,
            "audit_records": RECORDS,
        },
        [table, searches],
    )


def _entry(number: int) -> AuditEntry:
    command = f"pytest -q tests/test_{number % 97}.py --maxfail={number % 7} | tail -{number % 50}"
    return AuditEntry(
        chain_of(f"conversation-{number % CHAINS}"),
        f"agent:worker-{number % 40}",
        "shell" if number % 3 else "file",
        NAMES[number % len(NAMES)],
        arguments={"command": command},
        arguments_hash="ab" * 32,
        request=f"req-{number:016x}",
    )


async def _append(place: Path, key: SigningKey) -> tuple[float, list[float], list[float]]:
    """Measure records per second with many callers, and the wait of a single caller, in both modes."""
    database = await Database.open(str(place / "append.db"))
    store = AuditStore(database)
    logs = [AuditLog(store, key, "bench", no_event), AuditLog(store, key, "batched", no_event, strict=False)]

    async def work(number: int) -> None:
        for turn in range(EACH):
            (await logs[0].begin(_entry(number * EACH + turn))).end()

    try:
        for log in logs:
            await log.open()
        began = time.perf_counter()
        await asyncio.gather(*(work(number) for number in range(CALLERS)))
        await logs[0].flush()
        took = time.perf_counter() - began

        def single(log: AuditLog) -> Contender:
            async def one() -> float:
                began = time.perf_counter()
                ticket = await log.begin(_entry(1))
                took = time.perf_counter() - began
                await asyncio.sleep(0.001)  # about what a command takes
                ticket.end()
                return took

            return one

        # One after the other: if two logs wrote to one chain in turns, both would have to find its end again.
        waits = [(await rounds({"one": single(log)}, SINGLES, warm_up=5))["one"] for log in logs]
    finally:
        for log in logs:
            await log.close()
        await database.close()
    return 2 * CALLERS * EACH / took, waits[0], waits[1]


async def _empty(path: Path) -> Path:
    await (await Database.open(str(path))).close()
    return path


def _rows() -> Iterator[tuple[object, ...]]:
    """Yield operations of many chains in the order of time, each with its end directly after its start.

    The bytes of every record are derived from one record that the log itself would write, which takes half the time.
    """
    rng = random.Random(1)
    tips: dict[str, tuple[int, bytes]] = {}
    shapes: dict[int, tuple[RecordRow, str, RecordRow, str]] = {}
    at = BEGAN
    for number in range(RECORDS // 2):
        shape = shapes.get(number % SHAPES)
        if shape is None:
            shape = shapes[number % SHAPES] = _shape(number)
        one, begin_rest, two, end_rest = shape
        at += rng.random()
        seq, before = tips.get(one.chain) or (0, genesis(one.chain))
        chance = rng.random()
        result = "ok" if chance < 0.99 else "timeout" if chance < 0.999 else "sandbox_lost"
        begin = f'{{"chain":"{one.chain}","seq":{seq + 1},"at":{at:.6f},"type":"begin","node":"bench",{begin_rest}'
        linked = link(before, begin.encode())
        yield (one.chain, seq + 1, at, "begin", None, *one[5:9], None, linked, begin)
        end = f'{{"chain":"{one.chain}","seq":{seq + 2},"at":{at:.6f},"type":"end","node":"bench","ref":{seq + 1},'
        end += end_rest.replace("RESULT", result)
        before = link(linked, end.encode())
        yield (two.chain, seq + 2, at, "end", seq + 1, *two[5:9], result, before, end)
        tips[one.chain] = (seq + 2, before)


def _shape(number: int) -> tuple[RecordRow, str, RecordRow, str]:
    entry = _entry(number)
    begin = row("begin", entry, None, seq=1, at=BEGAN, node="bench", before=b"")
    ending = Ending("RESULT", number / 7, 0, number)
    end = row("end", entry, ending, seq=2, at=BEGAN, node="bench", before=b"", ref=1)
    return begin, begin.body[begin.body.index('"actor"') :], end, end.body[end.body.index('"actor"') :]


def _fill(path: Path) -> None:
    """Insert the rows first and create the indexes after, which is many times faster."""
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        for pragma in ("synchronous=OFF", "cache_size=-400000"):
            connection.execute(f"PRAGMA {pragma}")
        found = (
            "SELECT name, sql FROM sqlite_master WHERE type='index' AND tbl_name='audit_records' AND sql IS NOT NULL"
        )
        indexes = connection.execute(found).fetchall()
        connection.execute("BEGIN")
        for name, _ in indexes:
            connection.execute(f"DROP INDEX {name}")
        columns = "chain, seq, at, type, ref, actor, kind, name, decision, result, hash, body"
        marks = ", ".join("?" * 12)
        connection.executemany(f"INSERT INTO audit_records ({columns}) VALUES ({marks})", _rows())
        for _, sql in indexes:
            connection.execute(sql)
        connection.execute("COMMIT")
    finally:
        connection.close()


async def _searches(log: AuditLog) -> dict[str, list[float]]:
    wanted = {
        "newest": Filter(),
        "of a context": Filter(chain=chain_of("conversation-42")),
        "by an actor": Filter(actor="agent:worker-7"),
        "by name": Filter(name="edit"),
        "a rare result": Filter(result="sandbox_lost"),
        "an actor's failures": Filter(actor="agent:worker-7", result="timeout"),
        "in an hour": Filter(since=BEGAN + 50_000, until=BEGAN + 53_600),
        "a text, found": Filter(text="test_42.py"),
        "a text, nowhere": Filter(text="no such text"),
        "a text in a context": Filter(chain=chain_of("conversation-42"), text="no such text"),
        "nothing fits": Filter(
            actor="agent:worker-7", name="edit", kind="file", decision="allow", result="sandbox_lost"
        ),
        "denied": Filter(decision="deny"),
    }

    def timed(one: Filter) -> Contender:
        async def search() -> float:
            began = time.perf_counter()
            await log.search(one)
            return time.perf_counter() - began

        return search

    return await rounds({name: timed(one) for name, one in wanted.items()}, ROUNDS, warm_up=2)


async def _verify(log: AuditLog, path: Path, progress: Progress) -> tuple[int, float]:
    chains = [chain_of(f"conversation-{number}") for number in range(EXPORTED)]
    with path.open("wb") as file:
        async for piece in log.export(chains):
            file.write(piece)
    progress(4, STEPS)
    samples = []
    for _ in range(3):
        with path.open("rb") as source:
            began = time.perf_counter()
            verdict = await asyncio.to_thread(verify, source, keys=[log.key.public])
            samples.append(time.perf_counter() - began)
        if not verdict.ok:
            raise BenchFailed(f"the export does not verify: {verdict.broken}")
    return verdict.records, verdict.records / median(samples)
