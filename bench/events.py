"""The event log: appending with many callers, and how far 200 readers of one busy context are behind.

Readers are raw connections in a process of their own, so that what they cost does not delay the server's loop.
`CARREL_BENCH_READERS` and `CARREL_BENCH_EVENTS` change the sizes. `CARREL_BENCH_DATABASE` names a PostgreSQL.
No peer does the same.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from urllib.parse import urlsplit

from bench import ground
from bench.measure import BenchFailed, Progress, Report, Table, median, percentile
from carrel.client import AsyncClient
from carrel.events import EventLog
from carrel.models.events import EventDraft, body_of
from carrel.store import Database
from carrel.store.events import EventStore

CALLERS = 100
EACH = 200
READERS = int(os.environ.get("CARREL_BENCH_READERS", "200"))
EVENTS = int(os.environ.get("CARREL_BENCH_EVENTS", "1000"))
PER_SECOND = 50
CONTEXT = "bench-events"

_READ = """
import asyncio, json, sys, time
host, port, token, context, readers, events = sys.argv[1:]
behind, counts = [], []
async def read(ready):
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 22)
    writer.write(f"GET /v1/events?context_id={context} HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\n"
                 f"Authorization: Bearer {token}\\r\\n\\r\\n".encode())
    last = count = 0
    while count < int(events):
        line = await reader.readline()
        if line.startswith(b"HTTP/1.1 ") and b" 200 " not in line:
            raise SystemExit(line.decode())
        if line.startswith(b"id: ") and not ready.done():
            ready.set_result(None)
        if line.startswith(b"id: "):
            assert int(line[4:]) >= last, "out of order"
            last = int(line[4:])
        elif line.startswith(b"data: "):
            count += 1
            behind.append(time.time() - float(line.partition(b'"message":"')[2].partition(b'"')[0]))
    counts.append(count)
    writer.close()
async def main():
    loop = asyncio.get_running_loop()
    ready = [loop.create_future() for _ in range(int(readers))]
    tasks = [asyncio.create_task(read(each)) for each in ready]
    await asyncio.gather(*ready)
    print("ready", flush=True)
    await asyncio.wait_for(asyncio.gather(*tasks), 300)
    print(json.dumps({"counts": counts, "behind": behind}))
asyncio.run(main())
"""


async def run(progress: Progress) -> Report:
    """Measure."""
    async with ground.scratch() as place:
        rate, waits = await _append(os.environ.get("CARREL_BENCH_DATABASE") or str(place / "events.db"))
    async with ground.server() as server:
        behind = await _follow(server.url, str(server.token))
    figures = {
        "event_append_per_s": rate,
        "event_append_ms": median(waits) * 1e3,
        "sse_median_ms": median(behind) * 1e3,
        "sse_p99_ms": percentile(behind, 99) * 1e3,
    }
    table = Table(f"the event log; {READERS} readers of one context with {PER_SECOND} events a second", ("", "value"))
    table.add("events appended per second", rate)
    table.add("wait of one caller among them, median ms", median(waits) * 1e3)
    table.add("readers behind, median ms", median(behind) * 1e3)
    table.add("readers behind, p99 ms", percentile(behind, 99) * 1e3)
    return Report(figures, [table])


async def _append(database: str) -> tuple[float, list[float]]:
    """Measure events per second with many callers that wait until theirs is stored, and how long each waits."""
    opened = await Database.open(database)
    log = EventLog(EventStore(opened), "bench", keep_days=7, keep_bytes=2**30)
    waits: list[float] = []

    async def work(number: int) -> None:
        for turn in range(EACH):
            body = body_of({"operation": "run_command", "command": f"pytest -q tests/{number}/{turn}", "record": turn})
            began = time.perf_counter()
            await log.append([EventDraft(time.time(), "command.started", f"c{number}", "sbx-1", "bench", body)])
            waits.append(time.perf_counter() - began)

    try:
        await log.open()
        began = time.perf_counter()
        await asyncio.gather(*(work(number) for number in range(CALLERS)))
        took = time.perf_counter() - began
    finally:
        await log.close()
        await opened.close()
    return CALLERS * EACH / took, waits


async def _follow(url: str, token: str) -> list[float]:
    """Return how long after it was sent each event reached each reader."""
    where = urlsplit(url)
    words = [sys.executable, "-c", _READ, where.hostname, where.port, token, CONTEXT, READERS, EVENTS]
    process = await asyncio.create_subprocess_exec(*map(str, words), stdout=subprocess.PIPE, limit=1 << 28)
    assert process.stdout is not None
    try:
        if await process.stdout.readline() != b"ready\n":
            raise BenchFailed("the readers did not start")
        async with AsyncClient(url, token) as client:
            began, sent = time.perf_counter(), 0
            while sent < EVENTS:
                now = f"{time.time():.6f}"
                await client.publish_log([{"message": now}], context=CONTEXT)
                sent += 1
                await asyncio.sleep(max(0.0, began + sent / PER_SECOND - time.perf_counter()))
        read = json.loads(await asyncio.wait_for(process.stdout.read(), 300))
    finally:
        if process.returncode is None and await _ends_not(process):
            process.kill()
        await process.wait()
    if read["counts"] != [EVENTS] * READERS:
        raise BenchFailed("a reader missed events")
    return list(map(float, read["behind"]))


async def _ends_not(process: asyncio.subprocess.Process) -> bool:
    try:
        await asyncio.wait_for(process.wait(), 5)
    except TimeoutError:
        return True
    return False
