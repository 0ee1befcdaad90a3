"""Servers and sandboxes are killed at seeded moments while jobs are submitted and run: every accepted job reaches a visible
end, none runs twice that may run once only, and a reader that reconnects misses no event and gets none twice.

`CARREL_JOB_KILLS=50` kills more often.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from random import Random
from typing import Any

import httpx
import pytest
from tests.support.kill_server import Server
from tests.support.postgres import Postgres

from carrel.errors import CarrelError
from carrel.models import JobInfo, JobState

WANTED = os.environ.get("CARREL_JOB_KILLS", os.environ.get("CARREL_KILLS"))
KILLS = int(WANTED or 3)
DATABASES = ["sqlite", "postgresql"]
VICTIMS = ["server", "sandboxes"]
CASES = [(database, victims) for database in DATABASES for victims in VICTIMS]
"""Few kills take one database for each kind of victim."""
CONTEXTS = ("one", "two", "three")
LINES = 40
Json = dict[str, Any]


@pytest.fixture(autouse=True)
def _forks(carrel_forks: None) -> None: ...


@pytest.fixture(params=["sqlite", "postgresql"])
async def database(request: pytest.FixtureRequest) -> AsyncIterator[str | None]:
    if request.param == "sqlite":
        yield None
        return
    postgres: Postgres = request.getfixturevalue("postgres")
    schema = f"j{os.urandom(8).hex()}"
    await postgres.execute(f"CREATE SCHEMA {schema}")
    yield postgres.url(search_path=schema)
    await postgres.execute(f"DROP SCHEMA {schema} CASCADE")


class Reader:
    """Reads the events of jobs, and connects again wherever the server is by then."""

    def __init__(self, server: Server):
        self.seen: list[Json] = []
        self._server = server
        self._last = 0

    async def run(self) -> None:
        while True:
            with suppress(httpx.HTTPError, OSError, ValueError, KeyError):
                await self._read()
            await asyncio.sleep(0.02)

    async def _read(self) -> None:
        about = json.loads((self._server.data / "server.json").read_bytes())
        token = (self._server.data / "token").read_text().strip()
        headers = {"authorization": f"Bearer {token}", "last-event-id": str(self._last)}
        async with (
            httpx.AsyncClient(base_url=about["url"], headers=headers, timeout=30) as client,
            client.stream("GET", "/v1/events?kind=job") as answer,
        ):
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    self.seen.append(json.loads(line[6:]))
                elif line.startswith("id: "):
                    self._last = max(self._last, int(line[4:]))


class Submitter:
    """Submits jobs, and sends each again until the server has confirmed it."""

    def __init__(self, server: Server, worker: int):
        self.jobs: dict[str, tuple[str, int]] = {}
        self._server = server
        self._worker = worker

    async def run(self, dice: Random) -> None:
        number = 0
        while True:
            number += 1
            word, context = f"w{self._worker}n{number}", dice.choice(CONTEXTS)
            retries = dice.choice((0, 0, 3))
            naps = dice.choice((0, 0.01, 0.02))
            # The last line is written only by a run that comes to its end.
            work = f"echo {word} >> ran; for i in $(seq {LINES}); do echo {word} $i; sleep {naps}; done; echo {word} >> done"
            while True:
                with suppress(CarrelError, OSError, ValueError):
                    async with self._server.client() as client:
                        job = await client.jobs.submit(
                            work, context=context, retries=retries, backoff_s=0.05, idempotency_key=word
                        )
                    self.jobs[job.id] = (word, retries)
                    break
                await asyncio.sleep(0.02)
            await asyncio.sleep(dice.uniform(0, 0.05))


async def all_ended(server: Server, ids: set[str]) -> dict[str, JobInfo]:
    async with asyncio.timeout(120):
        while True:
            async with server.client() as client:
                found = {info.id: info async for info in client.jobs.list()}
            assert ids <= set(found), "an accepted job is not there"
            if all(info.state.terminal for info in found.values()):
                return found
            await asyncio.sleep(0.1)


async def counted(server: Server, name: str) -> Counter[str]:
    words: Counter[str] = Counter()
    async with server.client() as client:
        for context in CONTEXTS:
            box = await client.sandbox(context)
            words.update((await box.commands.run(f"cat {name} 2>/dev/null || true")).stdout.split())
    return words


@pytest.mark.parametrize(("database", "victims"), CASES if WANTED else CASES[::3], indirect=["database"])
async def test_every_accepted_job_reaches_a_visible_end(database: str | None, victims: str) -> None:
    dice = Random(11)
    server = Server(database, "directory")
    reader, submitters = Reader(server), [Submitter(server, number) for number in range(3)]
    try:
        await server.start()
        async with server.client() as client:
            for context in CONTEXTS:
                await client.sandbox(context)
        running = [asyncio.create_task(reader.run())]
        running += [asyncio.create_task(each.run(Random(number))) for number, each in enumerate(submitters)]
        for number in range(KILLS):
            await asyncio.sleep(dice.uniform(0.3, 1.2))
            if victims == "sandboxes":
                for pid in dice.sample(boxes := server.sandboxes(), min(1, len(boxes))):
                    os.kill(pid, signal.SIGKILL)
            if victims == "server" or number % 2:
                server.kill()
                await server.killed()
                await server.start()
        await asyncio.sleep(0.5)
        for task in running[1:]:
            task.cancel()
        await asyncio.gather(*running[1:], return_exceptions=True)
        jobs = {job: facts for each in submitters for job, facts in each.jobs.items()}
        assert len(jobs) > 10
        found = await all_ended(server, set(jobs))
        ran, done = await counted(server, "ran"), await counted(server, "done")
        states = Counter(info.state for info in found.values())
        for job, (word, retries) in jobs.items():
            info = found[job]
            if not retries:
                assert ran[word] <= 1, f"{word} ran twice"
            assert ran[word] <= info.attempt <= retries + 1
            assert info.state in {JobState.SUCCEEDED, JobState.LOST}, (info.state, info.reason)
            assert info.reason or info.state is JobState.SUCCEEDED
            if info.state is JobState.SUCCEEDED:
                assert done[word] >= 1
                async with server.client() as client:
                    text = (await (await client.jobs.get(job)).output()).text
                assert text == "".join(f"{word} {n}\n" for n in range(1, LINES + 1)), "its output is whole"
        if victims == "server":
            assert states == {JobState.SUCCEEDED: len(found)}, "sandboxes outlive the server, and so do their jobs"
        async with server.client() as client:
            now = [event async for event in client.events(kinds=["job"], after=0, follow=False)]
        async with asyncio.timeout(30):
            while not reader.seen or reader.seen[-1]["id"] < now[-1].id:
                await asyncio.sleep(0.02)
        assert [each["id"] for each in reader.seen] == [event.id for event in now], "every event once, in order"
        ends = Counter(event.job_id for event in now if event.kind == "job.ended")
        assert ends == Counter(found.keys())
        print(f"\n{victims}: {len(found)} jobs, {dict(states)}, {KILLS} kills")
        running[0].cancel()
        await asyncio.gather(running[0], return_exceptions=True)
        await server.stop()
    finally:
        server.close()


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_a_job_survives_two_restarts_with_its_output_whole(how: str) -> None:
    server = Server(None, "directory")
    lines = int(os.environ.get("CARREL_JOB_LINES", "60"))
    try:
        await server.start()
        async with server.client() as client:
            job = await client.jobs.submit(f"for i in $(seq {lines}); do echo line $i; sleep 0.1; done")
            own = await client.jobs.submit(f"for i in $(seq {lines}); do echo $i; sleep 0.1; done", context="c")
        for number in (1, 2):
            await asyncio.sleep(lines * 0.1 / 4)
            if how == "killed":
                server.kill()
                await server.killed()
            else:
                await server.stop()
            if number == 2:
                await asyncio.sleep(0.5)
            await server.start()
        async with server.client() as client:
            for name, prefix in ((job.id, "line "), (own.id, "")):
                again = await client.jobs.get(name)
                info = await again.wait(lines * 0.1 + 60)
                assert (info.state, info.attempt, info.exit_code) == (JobState.SUCCEEDED, 1, 0), info
                text = (await again.output()).text
                assert text == "".join(f"{prefix}{n}\n" for n in range(1, lines + 1))
            events = [event.kind async for event in client.events(kinds=["job"], after=0, follow=False)]
        assert sorted(events) == ["job.ended"] * 2 + ["job.queued"] * 2 + ["job.started"] * 2
        await server.stop()
    finally:
        server.close()
