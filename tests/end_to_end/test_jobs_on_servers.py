"""Jobs of several servers on one database, and of several workers of one server."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
from tests.support.kill_server import Server
from tests.support.postgres import Postgres

from carrel.models import JobState


@pytest.fixture(autouse=True)
def _forks(carrel_forks: None) -> None: ...


@pytest.fixture
async def database(postgres: Postgres) -> AsyncIterator[str]:
    schema = f"j{os.urandom(8).hex()}"
    await postgres.execute(f"CREATE SCHEMA {schema}")
    yield postgres.url(search_path=schema)
    await postgres.execute(f"DROP SCHEMA {schema} CASCADE")


def server_on(database: str, name: str) -> Server:
    settings = {
        "CARREL_NODE": name,
        "CARREL_LEASE_S": "3",
        "CARREL_TOKEN": "a-token-of-all-servers",
        "CARREL_SECRET_KEY": "QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVowMTIzNDU=",
        "CARREL_JOBS_AT_ONCE": "4",
    }
    return Server(database, "directory", settings=settings)


async def test_another_server_finds_the_jobs_of_one_that_died(database: str) -> None:
    first, second = server_on(database, "a"), server_on(database, "b")
    try:
        await first.start()
        await second.start()
        async with first.client() as one, second.client() as two:
            await one.sandbox("on-a")
            quick = [await two.jobs.submit(f"echo {n}") for n in range(12)]
            for number, job in enumerate(quick):
                info = await (await one.jobs.get(job.id)).wait(60)
                assert info.state is JobState.SUCCEEDED, info
                assert (await (await one.jobs.get(job.id)).output()).text == f"{number}\n"
            owners = {
                event.node async for event in two.events(kinds=["job.started"], after=0, follow=False) if event.job_id
            }
            assert owners == {"a", "b"}, "both take part"

            # A context whose sandbox runs on one server: its jobs run there, and can be cancelled through the other.
            there = await two.jobs.submit("echo here; sleep 600", context="on-a")
            async with asyncio.timeout(30):
                while not (await there.info()).output_bytes:
                    await asyncio.sleep(0.05)
            assert (await there.info()).node == "a"
            assert [chunk.text async for chunk in there.logs(follow=False)] == ["here\n"]
            await there.cancel()
            assert (await there.wait(30)).state is JobState.CANCELLED

            lost = await two.jobs.submit("echo begun; sleep 600", context="on-a")
            again = await two.jobs.submit(
                "echo x >> n; test $(wc -l < n) != 1 || sleep 600", context="on-a", retries=1, backoff_s=0.1
            )
            async with asyncio.timeout(30):
                while not (await lost.info()).output_bytes or (await again.info()).state is not JobState.RUNNING:
                    await asyncio.sleep(0.05)
        boxes = first.sandboxes()
        first.kill()
        await first.killed()
        for pid in boxes:
            os.kill(pid, signal.SIGKILL)
        async with second.client() as two:
            info = await (await two.jobs.get(lost.id)).wait(60)
            assert info.state is JobState.LOST
            assert info.reason == "the server 'a', which ran it, no longer answers"
            assert (await (await two.jobs.get(lost.id)).output()).text == "begun\n", "its output outlives its server"
            events = [e.kind async for e in two.events(kinds=["job"], after=0, follow=False) if e.job_id == lost.id]
            assert events == ["job.queued", "job.started", "job.ended"]
            tried = await (await two.jobs.get(again.id)).info()
            assert tried.attempt >= 1
            await (await two.jobs.get(again.id)).cancel()
        await second.stop()
    finally:
        first.close()
        second.close()


async def test_workers_share_the_jobs() -> None:
    server = Server(None, "directory", settings={"CARREL_WORKERS": "2"})
    try:
        await server.start()
        async with server.client() as client:
            jobs = [await client.jobs.submit(f"echo {n}; sleep 0.2", context=f"c{n % 4}") for n in range(24)]
            long = await client.jobs.submit("for i in $(seq 40); do echo $i; sleep 0.1; done", context="c0")
            ends = [await job.wait(60) for job in jobs]
            assert {info.state for info in ends} == {JobState.SUCCEEDED}
            for number, job in enumerate(jobs):
                assert (await job.output()).text == f"{number}\n"
        await server.stop()
        await server.start()
        async with server.client() as client:
            info = await (await client.jobs.get(long.id)).wait(60)
            assert (info.state, info.attempt) == (JobState.SUCCEEDED, 1), info
            text = (await (await client.jobs.get(long.id)).output()).text
            assert text == "".join(f"{n}\n" for n in range(1, 41))
        await server.stop()
    finally:
        server.close()
