"""Servers, NATS and sandboxes are killed at seeded moments while jobs are submitted and run: every accepted job reaches a
visible end, none runs twice that may run once only, and a reader that reconnects misses no event and gets none twice.

`CARREL_JOB_KILLS=100` kills more often, in every combination.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from contextlib import suppress
from itertools import product
from random import Random

import pytest
from tests.support.kill_events import Reader, delivered, events_of, kill_and_start
from tests.support.kill_server import Server
from tests.support.nats import NatsServer

from carrel.errors import CarrelError
from carrel.models import JobInfo, JobState

_ASKED = os.environ.get("CARREL_JOB_KILLS", os.environ.get("CARREL_KILLS"))
KILLS = int(_ASKED or "3")
EVERY = list(product(("sqlite", "postgresql"), ("no bus", "nats"), ("server", "sandboxes")))
FEW = [("sqlite", "nats", "server"), ("postgresql", "no bus", "sandboxes")]
"""Each of them is met once."""
CONTEXTS = ("one", "two", "three")
LINES = 40
LONG_LINES = int(os.environ.get("CARREL_JOB_LINES", "60"))
"""Of the jobs that survive restarts: ten a second."""


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


@pytest.mark.timeout(300 + KILLS * 20)
@pytest.mark.parametrize(("database", "bus", "victims"), EVERY if _ASKED else FEW, indirect=["database", "bus"])
async def test_every_accepted_job_reaches_a_visible_end(
    database: str | None, bus: NatsServer | None, victims: str
) -> None:
    dice = Random(11)
    server = Server(database, "directory", settings={} if bus is None else {"CARREL_BUS": bus.url})
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
                await kill_and_start(server, bus if number % 4 < 2 else None, dice)
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
        now = await events_of(server)
        await reader.reaches(now[-1]["id"])
        assert reader.ids == [*range(1, reader.ids[-1] + 1)], "every event once, in order"
        if bus is not None:
            assert (await delivered(bus, len(now)))[: len(now)] == [each["id"] for each in now]
        ends = Counter(each["job_id"] for each in now if each["kind"] == "job.ended")
        assert ends == Counter(found.keys())
        print(f"\n{victims}: {len(found)} jobs, {dict(states)}, {KILLS} kills")
        running[0].cancel()
        await asyncio.gather(running[0], return_exceptions=True)
        await server.stop()
    finally:
        server.close()


@pytest.mark.timeout(300 + LONG_LINES // 5)
@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_a_job_survives_two_restarts_with_its_output_whole(how: str) -> None:
    server = Server(None, "directory")
    lines = LONG_LINES
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
