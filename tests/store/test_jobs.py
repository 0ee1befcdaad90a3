from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from carrel.control.jobs import lifecycle
from carrel.control.jobs.lifecycle import JobOutcome
from carrel.models import JobState
from carrel.models.events import EVERYTHING, EventFilter
from carrel.store import Database
from carrel.store.events import EventStore
from carrel.store.jobs import JobRecord, JobStep, JobStore, OutputPiece

LEASE = 10.0
submitted = partial(lifecycle.submitted, shown={"summary": "true"})


@pytest.fixture
async def jobs(database: Database) -> AsyncIterator[JobStore]:
    await EventStore(database).open()
    store = JobStore(database)
    yield store
    await store.close()


def make(number: int, namespace: str = "default", **more: Any) -> JobRecord:
    request = {"command": "true", **more.pop("request", {})}
    values: dict[str, Any] = {
        "id": f"job-{number:020x}",
        "namespace": namespace,
        "context_id": f"{namespace}:c",
        "own_workspace": False,
        "state": JobState.QUEUED,
        "priority": 0,
        "attempt": 0,
        "fence": 0,
        "created_at": 0.0,
        "queued_at": 0.0,
        "not_before": 0.0,
        "request": request,
        "subject": "agent:a",
    }
    return JobRecord(**{**values, **more})


async def put(jobs: JobStore, *records: JobRecord) -> list[JobRecord]:
    return [(await jobs.insert(submitted, each))[0] for each in records]


async def claim(jobs: JobStore, owner: str, free: int) -> list[JobRecord]:
    return await jobs.claim(
        owner,
        owner,
        free,
        partial(lifecycle.share, free=free, at_once=None, rate=None),
        lambda record, now: lifecycle.claimed(record, now, owner, LEASE, dispatched=True),
        recent_s=60.0,
    )


async def test_a_job_is_stored_with_its_event(jobs: JobStore, database: Database) -> None:
    (job,) = await put(jobs, make(1))
    assert await jobs.get(job.id) == job and job.created_at > 1.7e9
    events = EventStore(database)
    await events.number()
    (event,) = await events.page(EventFilter(job_id=job.id), 0, 10)
    assert event.kind == "job.queued" and json.loads(event.body)["summary"] == "true"
    assert await events.page(EventFilter(job_id="job-other"), 0, 10) == []


async def test_the_same_idempotency_key_gives_the_same_job(jobs: JobStore, database: Database) -> None:
    one, two = make(1, idempotency_key="k"), make(2, idempotency_key="k")
    made = await asyncio.gather(*(jobs.insert(submitted, each) for each in (one, two, make(3))))
    assert sorted(new for _, new in made) == [False, True, True]
    assert made[0][0].id == made[1][0].id
    events = EventStore(database)
    await events.number()
    assert len(await events.page(EVERYTHING, 0, 10)) == 2


async def test_no_job_is_claimed_twice(jobs: JobStore) -> None:
    await put(jobs, *(make(number, namespace="ab"[number % 2]) for number in range(40)))
    owners = [f"n{n}" for n in range(8)]
    found = [job for claimed in await asyncio.gather(*(claim(jobs, o, 5) for o in owners)) for job in claimed]
    found += [job for owner in owners for job in await claim(jobs, owner, 40)]
    assert Counter(job.id for job in found) == Counter(f"job-{number:020x}" for number in range(40))
    assert all(job.attempt == job.fence == 1 for job in found)


async def test_priority_counts_within_a_namespace_only(jobs: JobStore) -> None:
    await put(jobs, *(make(number, "a", priority=number) for number in range(4)), make(9, "b", priority=-9))
    assert [job.id[-1] for job in await claim(jobs, "n", 3)] == ["3", "9", "2"]


async def test_a_write_with_an_old_fence_changes_nothing(jobs: JobStore) -> None:
    await put(jobs, make(1))
    (job,) = await claim(jobs, "n", 1)
    adopted = await jobs.change(job.id, lambda record, now: lifecycle.adopted(record, now, "n", "n", LEASE))
    assert adopted is not None and adopted.fence == 2

    def end(record: JobRecord, now: float) -> JobStep | None:
        return lifecycle.ended(record, now, JobOutcome(JobState.SUCCEEDED), 60.0)

    piece = OutputPiece(0, "stdout", b"late", 4)
    assert await jobs.conclude(job, end, [piece]) is None
    assert await jobs.output(job.id, 1, 0) == []
    done = await jobs.conclude(adopted, end, [piece], {"files": [{"path": "x"}], "truncated": False})
    assert done is not None and done.state is JobState.SUCCEEDED
    assert await jobs.get(job.id) == done
    assert await jobs.output(job.id, 1, 2) == [piece] and await jobs.output(job.id, 1, 4) == []
    assert await jobs.artifacts(job.id) == ([{"path": "x"}], False)


async def test_a_change_that_fails_fails_alone(jobs: JobStore) -> None:
    first, second = await put(jobs, make(1), make(2))

    def broken(record: JobRecord, now: float) -> JobStep | None:
        raise ValueError("broken")

    results = await asyncio.gather(
        jobs.change(first.id, broken),
        jobs.change(second.id, lambda record, now: lifecycle.cancelled(record, now, "p", 60.0)),
        return_exceptions=True,
    )
    assert isinstance(results[0], ValueError)
    assert isinstance(results[1], JobRecord) and results[1].state is JobState.CANCELLED
    assert await jobs.get(first.id) == first


async def test_leases_are_renewed_and_found_when_they_end(jobs: JobStore) -> None:
    await put(jobs, make(1), make(2))
    claimed = await claim(jobs, "n", 2)
    assert await jobs.abandoned(0.0, ["x"]) == []
    await jobs.renew("n", -5.0)
    assert sorted(await jobs.abandoned(1.0, ["x"])) == sorted(job.id for job in claimed)
    await jobs.change(claimed[0].id, lambda record, now: lifecycle.cancelled(record, now, "p", 60.0))
    held = await jobs.renew("n", LEASE)
    assert {name: (each.fence, each.cancel) for name, each in held.items()} == {
        claimed[0].id: (1, True),
        claimed[1].id: (1, False),
    }
    assert await jobs.cancelled("n") == [claimed[0].id] and await jobs.abandoned(0.0, ["x"]) == []
    assert [job.id for job in await jobs.running()] == sorted(job.id for job in claimed)


async def test_ended_jobs_expire(jobs: JobStore) -> None:
    (job,) = await put(jobs, make(1))
    done = await jobs.change(job.id, lambda record, now: lifecycle.cancelled(record, now, "p", -1.0))
    assert done is not None and [each.id for each in await jobs.expired()] == [job.id]
    await jobs.remove(job.id, [lifecycle.removed(done, 1.0)])
    assert await jobs.get(job.id) is None and await jobs.expired() == []


async def test_waiting_jobs_are_found_when_their_approval_is_gone(jobs: JobStore) -> None:
    await put(jobs, make(1))
    (job,) = await claim(jobs, "n", 1)
    await jobs.change(job.id, lambda record, now: lifecycle.asked(record, now, "apr-1", "start_command", 0, 60.0))
    assert await jobs.decided() == [job.id]


async def test_pages(jobs: JobStore) -> None:
    made = await put(jobs, *(make(number, "ab"[number % 2]) for number in range(6)))
    first, cursor = await jobs.page(limit=4)
    rest, end = await jobs.page(limit=4, cursor=cursor)
    assert [job.id for job in (*first, *rest)] == [job.id for job in reversed(made)] and end is None
    assert len((await jobs.page(limit=9, namespace="a"))[0]) == 3
    assert (await jobs.page(limit=9, states=[JobState.RUNNING]))[0] == []
    assert (await jobs.page(limit=9, contexts=["b:c"]))[0] == (await jobs.page(limit=9, context_id="b:c"))[0]


async def test_a_job_starts_when_it_is_stored_unless_others_wait(jobs: JobStore) -> None:
    def start(record: JobRecord, now: float) -> JobStep:
        return lifecycle.claimed(record, now, "n", LEASE, dispatched=True)

    first, _ = await jobs.insert(submitted, make(1), start)
    assert first == await jobs.get(first.id) and (first.state, first.attempt, first.owner) == (JobState.RUNNING, 1, "n")
    await put(jobs, make(2))
    third, _ = await jobs.insert(submitted, make(3), start)
    assert third.state is JobState.QUEUED
    assert [job.id[-1] for job in await claim(jobs, "n", 1)] == ["2"]


async def test_what_a_server_knows_of_its_job_is_compared_with_what_is_stored(jobs: JobStore) -> None:
    await put(jobs, make(1))
    (known,) = await claim(jobs, "n", 1)
    await jobs.renew("n", 2 * LEASE)
    note = partial(lifecycle.noted, facts={"phase": "running"})
    noted = await jobs.change(known.id, note, known)
    stored = await jobs.get(known.id)
    assert noted is not None and stored is not None and stored.facts == noted.facts
    assert stored.lease_until is not None and known.lease_until is not None
    assert stored.lease_until > known.lease_until, "the lease stays as it was renewed"
    await jobs.change(known.id, lambda record, now: lifecycle.cancelled(record, now, "p", 60.0))
    noted = await jobs.change(known.id, partial(lifecycle.noted, facts={"output": 5}), noted)
    assert noted is not None and noted.cancel and noted.facts.output == 5, "somebody cancelled it meanwhile"
