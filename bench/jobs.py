"""Jobs: from the queue to the work, one at a time, and 1,000 of 8 clients beside the same commands by the SDK.

Both sides use the same sandbox and the same clients in this process. `CARREL_BENCH_JOBS` changes the number. No peer
does the same.
"""

from __future__ import annotations

import asyncio
import os
import time

from bench import ground
from bench.measure import BenchFailed, Progress, Report, Table, median, paired_ratio, percentile
from carrel.client import AsyncClient
from carrel.models import JobState

JOBS = int(os.environ.get("CARREL_BENCH_JOBS", "1000"))
CLIENTS = 8
ALONE = 60
ROUNDS = 3
CONTEXT = "bench-jobs"
COMMAND = ["true"]
LONGEST_S = 300.0


async def run(progress: Progress) -> Report:
    """Measure."""
    async with ground.server() as server:
        async with AsyncClient(server.url, server.token) as client:
            await client.sandbox(CONTEXT)
            overheads, whole = await _alone(client)
        clients = [AsyncClient(server.url, server.token) for _ in range(CLIENTS)]
        try:
            by_sdk, by_jobs = [], []
            for number in range(ROUNDS):
                progress(number, ROUNDS)
                by_sdk.append(await _by_sdk(clients))
                by_jobs.append(await _by_jobs(clients))
        finally:
            for each in clients:
                await each.close()
    ratio = paired_ratio(by_jobs, by_sdk)
    table = Table(f"{JOBS} × `true` in one sandbox, {CLIENTS} clients, {ROUNDS} rounds", ("", "value"))
    table.add("job: queued → running, median ms", median(overheads))
    table.add("job: queued → running, p90 ms", percentile(overheads, 90))
    table.add("job: submitted → end seen by the client, median ms", median(whole))
    table.add("jobs per second", median(by_jobs))
    table.add("commands of the SDK per second", median(by_sdk))
    table.add("jobs × commands", ratio)
    figures = {
        "job_overhead_ms": median(overheads),
        "job_whole_ms": median(whole),
        "jobs_per_s": median(by_jobs),
        "jobs_rate_vs_sdk": ratio,
    }
    return Report(figures, [table])


async def _alone(client: AsyncClient) -> tuple[list[float], list[float]]:
    """Return the milliseconds from the queue to the work of single jobs, and until their client saw the end."""
    overheads, whole = [], []
    for _ in range(ALONE):
        began = time.perf_counter()
        job = await client.jobs.submit(COMMAND, context=CONTEXT)
        info = await job.wait()
        whole.append((time.perf_counter() - began) * 1e3)
        if info.state is not JobState.SUCCEEDED or info.queued_ms is None or info.starting_ms is None:
            raise BenchFailed(f"a job is {info.state}: {info.reason}")
        overheads.append(info.queued_ms + info.starting_ms)
    return overheads, whole


async def _by_sdk(clients: list[AsyncClient]) -> float:
    """Run the commands, and return how many a second."""

    async def work(client: AsyncClient) -> None:
        box = await client.sandbox(CONTEXT)
        for _ in range(JOBS // CLIENTS):
            await box.commands.run(COMMAND)

    began = time.perf_counter()
    await asyncio.gather(*map(work, clients))
    return JOBS / (time.perf_counter() - began)


async def _by_jobs(clients: list[AsyncClient]) -> float:
    """Submit the jobs, wait until the last has ended, and return how many a second."""
    submitted: set[str] = set()
    ended: set[str] = set()
    first = await clients[0].jobs.submit(COMMAND, context=CONTEXT)
    await first.wait()
    after = max([event.id async for event in first.events(follow=False)])

    async def watch() -> None:
        async for event in clients[0].events(CONTEXT, kinds=["job.ended"], after=after):
            if event.body.get("state") != "succeeded":
                raise BenchFailed(f"a job did not succeed: {event.body}")
            ended.add(event.job_id or "")
            if len(ended) >= JOBS:
                return

    async def work(client: AsyncClient) -> None:
        for _ in range(JOBS // CLIENTS):
            submitted.add((await client.jobs.submit(COMMAND, context=CONTEXT)).id)

    async with asyncio.timeout(LONGEST_S):
        watching = asyncio.ensure_future(watch())
        began = time.perf_counter()
        await asyncio.gather(*map(work, clients))
        await watching
        took = time.perf_counter() - began
    if ended != submitted:
        raise BenchFailed("the jobs that ended are not those that were submitted")
    return JOBS / took
