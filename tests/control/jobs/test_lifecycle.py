from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from carrel.control.jobs import lifecycle
from carrel.control.jobs.lifecycle import JobOutcome
from carrel.models import JobState
from carrel.store.jobs import JobRecord, JobStep, Queue

TTL, LEASE, GRACE = 100.0, 10.0, 5.0


def record(**request: Any) -> JobRecord:
    return JobRecord(
        id="job-00000000000000000001",
        namespace="default",
        context_id="c",
        own_workspace=False,
        state=JobState.QUEUED,
        priority=0,
        attempt=0,
        fence=0,
        created_at=0.0,
        queued_at=0.0,
        not_before=0.0,
        request={"command": "true", "timeouts": {"queue_s": 50.0}, **request},
        subject="agent:a",
    )


class Jobs(RuleBasedStateMachine):
    """Everything that can happen to a job, in any order, from servers that may be out of date."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.retries = 2
        self.job = lifecycle.submitted(record(retries=2, backoff_s=1.0), self.now, {}).record
        self.begun: list[int] = []  # the attempt of each beginning of the work
        self.ends = 0

    def take(self, step: JobStep | None) -> None:
        if step is None:
            return
        before, after = self.job, step.record
        assert not before.state.terminal, "a job that has ended never changes"
        assert after.fence >= before.fence and after.attempt >= before.attempt
        assert len(step.events) <= 2
        assert all(event.job_id == before.id for event in step.events)
        self.ends += after.state.terminal
        self.job = after

    @rule(seconds=st.floats(0.0, 40.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.job.state is JobState.QUEUED and self.job.not_before <= self.now)
    @rule(owner=st.sampled_from("ab"), dispatched=st.booleans())
    def claim(self, owner: str, dispatched: bool) -> None:
        before = self.job
        self.take(lifecycle.claimed(before, self.now, owner, LEASE, dispatched=dispatched))
        assert self.job.fence == before.fence + 1
        assert self.job.attempt == before.attempt + (not before.facts.resumes)

    @rule()
    def begin(self) -> None:
        if self.job.state is JobState.RUNNING and self.begun[-1:] != [self.job.attempt]:
            self.take(lifecycle.noted(self.job, self.now, {"dispatched": True}))
            self.begun.append(self.job.attempt)

    @rule(owner=st.sampled_from("ab"))
    def adopt(self, owner: str) -> None:
        self.take(lifecycle.adopted(self.job, self.now, owner, owner, LEASE))

    @rule(pause=st.floats(0, 5))
    def put_back(self, pause: float) -> None:
        if not self.job.facts.dispatched:
            self.take(lifecycle.put_back(self.job, self.now, "no room", pause, TTL))

    @rule()
    def ask(self) -> None:
        if not self.job.facts.dispatched:
            self.take(lifecycle.asked(self.job, self.now, "apr-1", "start_command", 0, TTL))

    @rule()
    def decide(self) -> None:
        self.take(lifecycle.decided(self.job, self.now))

    @rule()
    def cancel(self) -> None:
        self.take(lifecycle.cancelled(self.job, self.now, "person:p", TTL))

    @rule(state=st.sampled_from([JobState.SUCCEEDED, JobState.FAILED, JobState.TIMED_OUT, JobState.LOST]))
    def end(self, state: JobState) -> None:
        self.take(lifecycle.ended(self.job, self.now, JobOutcome(state), TTL))

    @rule()
    def look(self) -> None:
        self.take(lifecycle.overdue(self.job, self.now, TTL))
        self.take(lifecycle.abandoned(self.job, self.now, TTL, GRACE))

    @invariant()
    def agrees(self) -> None:
        job = self.job
        assert (job.owner is not None) == (job.lease_until is not None) == (job.state is JobState.RUNNING)
        assert job.expires_at is None or job.expires_at == (job.facts.ended_at or 0) + TTL
        assert (job.expires_at is not None) == job.state.terminal == (job.facts.ended_at is not None)
        assert self.ends == job.state.terminal
        assert self.begun == sorted(set(self.begun)), "the work of an attempt began twice"
        assert job.facts.tries <= self.retries and job.attempt <= self.retries + 1
        waits = job.state in {JobState.QUEUED, JobState.WAITING_APPROVAL}
        assert not (waits and job.cancel), "a cancelled job waits for nothing"

    def teardown(self) -> None:
        """From wherever it is, a job ends if nobody does anything but look: approvals expire, leases end."""
        for _ in range(12):
            self.now += 200.0
            self.take(lifecycle.decided(self.job, self.now))
            self.take(lifecycle.abandoned(self.job, self.now, TTL, GRACE))
            self.take(lifecycle.overdue(self.job, self.now + 200.0, TTL))
        assert self.job.state.terminal


TestJobs = Jobs.TestCase


def running(**request: Any) -> JobRecord:
    queued = lifecycle.submitted(record(**request), 1000.0, {}).record
    return lifecycle.claimed(queued, 1001.0, "a", LEASE, dispatched=True).record


def test_without_retries_a_failure_is_the_end() -> None:
    step = lifecycle.ended(running(), 1002.0, JobOutcome(JobState.FAILED, exit_code=3), TTL)
    assert step is not None and step.record.state is JobState.FAILED and step.record.facts.exit_code == 3
    assert step.record.expires_at == 1102.0 and step.record.attempt == 1


def test_the_pause_before_a_retry_doubles() -> None:
    job, pauses = running(retries=3, backoff_s=2.0), []
    for _ in range(3):
        step = lifecycle.ended(job, 1002.0, JobOutcome(JobState.FAILED), TTL)
        assert step is not None and step.record.state is JobState.QUEUED
        pauses.append(step.record.not_before - 1002.0)
        job = lifecycle.claimed(step.record, step.record.not_before, "a", LEASE, dispatched=True).record
    assert pauses == [2.0, 4.0, 8.0] and job.attempt == 4
    last = lifecycle.ended(job, 1002.0, JobOutcome(JobState.FAILED), TTL)
    assert last is not None and last.record.state is JobState.FAILED


@pytest.mark.parametrize("outcome", [JobOutcome(JobState.CANCELLED), JobOutcome(JobState.FAILED, "denied", final=True)])
def test_some_ends_are_not_tried_again(outcome: JobOutcome) -> None:
    step = lifecycle.ended(running(retries=5), 1002.0, outcome, TTL)
    assert step is not None and step.record.state is outcome.state


def test_a_job_whose_work_had_not_begun_is_not_lost_with_its_server() -> None:
    idle = running()
    idle = replace(idle, facts=replace(idle.facts, dispatched=False))
    step = lifecycle.abandoned(idle, 1100.0, TTL, GRACE)
    assert step is not None and step.record.state is JobState.QUEUED and step.record.facts.resumes
    begun = lifecycle.abandoned(running(), 1100.0, TTL, GRACE)
    assert begun is not None and begun.record.state is JobState.LOST
    assert begun.record.facts.reason == "the server 'a', which ran it, no longer answers"


def test_starts_that_failed_are_counted_through_the_queue() -> None:
    failed = lifecycle.put_back(running(), 1002.0, "it did not start", 1.0, TTL, failed_start=True)
    assert failed is not None
    again = lifecycle.claimed(failed.record, 1004.0, "n", 10.0, dispatched=False).record
    assert (again.attempt, again.facts.failed_starts) == (1, 1), "the same attempt, which knows of it"


def test_the_time_of_the_queue_says_what_was_missing() -> None:
    back = lifecycle.put_back(running(), 1002.0, "all sandboxes are in use", 1.0, TTL)
    assert back is not None
    assert lifecycle.overdue(back.record, 1049.0, TTL) is None
    step = lifecycle.overdue(back.record, 1051.0, TTL)
    assert step is not None and step.record.state is JobState.TIMED_OUT
    assert step.record.facts.reason == "it could not start within timeouts.queue_s: all sandboxes are in use"


queues = st.dictionaries(
    st.sampled_from("abcd"),
    st.builds(
        lambda count, running, recent: (count, running, recent), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)
    ),
)


@given(queues, st.integers(0, 20), st.none() | st.integers(1, 8), st.none() | st.integers(1, 8))
def test_namespaces_share_fairly(
    sizes: dict[str, tuple[int, int, int]], free: int, at_once: int | None, rate: int | None
) -> None:
    given_queues = {
        name: Queue([replace(record(), id=f"{name}{n}") for n in range(count)], running, recent)
        for name, (count, running, recent) in sizes.items()
    }
    chosen = [each.id for each in lifecycle.share(given_queues, free, at_once=at_once, rate=rate)]
    assert len(chosen) == len(set(chosen)) <= free
    after, left = {}, {}
    for name, queue in given_queues.items():
        mine = [each for each in chosen if each.startswith(name)]
        assert mine == [each.id for each in queue.waiting[: len(mine)]], "in the order of the queue"
        after[name] = queue.running + len(mine)
        assert not mine or at_once is None or after[name] <= at_once
        assert not mine or rate is None or queue.recent + len(mine) <= rate
        blocked = (at_once is not None and after[name] >= at_once) or (
            rate is not None and queue.recent + len(mine) >= rate
        )
        left[name] = len(mine) < len(queue.waiting) and not blocked
    if any(left.values()):
        assert len(chosen) == free, "nothing stays free while somebody waits"
    for name in given_queues:
        others = [other for other in given_queues if any(each.startswith(other) for each in chosen)]
        if left[name]:
            assert all(after[other] <= after[name] + 1 for other in others), "nobody gets two before another gets one"
