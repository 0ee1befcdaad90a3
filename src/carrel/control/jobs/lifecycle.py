"""What becomes of a job: a pure function for everything that can happen to one. No I/O, no clock.

Each function gets the record and the time, and returns the new record with its events, or None if nothing changes. A
job that has ended never changes again. `JobStore` calls them in the transaction that writes the record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from carrel.models import JobInfo, JobRequest, JobState
from carrel.models.events import EventDraft, EventKind, body_of
from carrel.models.jobs import LONGEST_BACKOFF_S
from carrel.store.jobs import JobFacts, JobRecord, JobStep, Queue

CANCELLED = "it was cancelled"
TRIED_AGAIN = frozenset({JobState.FAILED, JobState.TIMED_OUT, JobState.LOST})
"""The ends after which a job is run again, if its submitter asked for retries."""


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """How an attempt ended. With `final` it is not tried again: it was refused, or its whole time is over."""

    state: JobState
    reason: str | None = None
    final: bool = False
    exit_code: int | None = None
    signal: str | None = None
    oom_killed: bool = False


def submitted(record: JobRecord, now: float, shown: Mapping[str, object]) -> JobStep:
    """A new job is queued. `shown` is for its event."""
    record = replace(record, created_at=now, queued_at=now, not_before=now)
    record = replace(record, due_at=_due(record, now))
    return JobStep(record, [_event(record, now, EventKind.JOB_QUEUED, shown)])


def claimed(record: JobRecord, now: float, owner: str, lease_s: float, *, dispatched: bool) -> JobStep:
    """A server begins the next attempt, or goes on with one whose work has not begun. `dispatched`: its work may begin
    at once, before anything more is written.
    """
    assert record.state is JobState.QUEUED
    facts = record.facts
    waited = max(0.0, now - max(record.queued_at, record.not_before))
    kept = JobFacts(tries=facts.tries, retry_of=facts.retry_of)
    if facts.resumes:
        kept = replace(
            kept,
            step=facts.step,
            operation=facts.operation,
            session_id=facts.session_id,
            reason=facts.reason,
            failed_starts=facts.failed_starts,
        )
    record = replace(
        record,
        state=JobState.RUNNING,
        attempt=record.attempt if facts.resumes else record.attempt + 1,
        fence=record.fence + 1,
        owner=owner,
        lease_until=now + lease_s,
        claimed_at=now,
        due_at=None,
        facts=replace(kept, phase="starting", claim=record.fence + 1, dispatched=dispatched, queued_ms=waited * 1000),
    )
    return JobStep(record, [_started(record, now)] if dispatched else [])


def _started(record: JobRecord, now: float) -> EventDraft:
    return _event(record, now, EventKind.JOB_STARTED, {"attempt": record.attempt})


def adopted(record: JobRecord, now: float, former: str | None, owner: str, lease_s: float) -> JobStep | None:
    """A new process goes on with a job of one that has died, its own predecessor or another of the same server."""
    if record.state is not JobState.RUNNING or record.owner != former:
        return None
    return JobStep(replace(record, owner=owner, fence=record.fence + 1, lease_until=now + lease_s))


def noted(record: JobRecord, now: float, facts: Mapping[str, Any]) -> JobStep | None:
    """The server of a running job has learned something about it."""
    if record.state is not JobState.RUNNING:
        return None
    before = record.facts
    after = replace(record, facts=replace(before, **facts))
    events = []
    if after.facts.dispatched and not before.dispatched:
        events.append(_started(after, now))
    if after.facts.progress_at != before.progress_at:
        events.append(_event(after, now, EventKind.JOB_PROGRESS, {"progress": after.facts.progress}))
    return JobStep(after, events)


def put_back(
    record: JobRecord, now: float, reason: str | None, pause_s: float, ttl_s: float, *, failed_start: bool = False
) -> JobStep | None:
    """Its work has not begun and cannot begin now: it waits for its turn again, with the same attempt."""
    if record.state is not JobState.RUNNING:
        return None
    if record.cancel:
        return ended(record, now, JobOutcome(JobState.CANCELLED, CANCELLED), ttl_s)
    failed = record.facts.failed_starts + failed_start
    facts = replace(record.facts, phase=None, reason=reason, resumes=True, dispatched=False, failed_starts=failed)
    waiting = replace(
        record, state=JobState.QUEUED, owner=None, lease_until=None, not_before=now + pause_s, facts=facts
    )
    # It keeps its place in the queue, and the queue timeout goes on from where the job was queued.
    waiting = replace(waiting, due_at=_due(waiting, waiting.queued_at))
    told = [] if reason == record.facts.reason else [_event(waiting, now, EventKind.JOB_QUEUED, {"reason": reason})]
    return JobStep(waiting, told)


def asked(record: JobRecord, now: float, approval: str, operation: str, step: int, ttl_s: float) -> JobStep | None:
    """A person has to decide before the work can begin. The server is free for other jobs meanwhile."""
    if record.state is not JobState.RUNNING:
        return None
    if record.cancel:
        return ended(record, now, JobOutcome(JobState.CANCELLED, CANCELLED), ttl_s)
    facts = replace(
        record.facts, phase=None, reason=None, resumes=True, dispatched=False, operation=operation, step=step
    )
    waiting = replace(
        record,
        state=JobState.WAITING_APPROVAL,
        owner=None,
        lease_until=None,
        approval=approval,
        due_at=_whole(record),
        facts=facts,
    )
    return JobStep(
        waiting, [_event(waiting, now, EventKind.JOB_WAITING, {"approval": approval, "operation": operation})]
    )


def decided(record: JobRecord, now: float) -> JobStep | None:
    """A person has decided, or nobody did in time: the job goes on, and finds out."""
    if record.state is not JobState.WAITING_APPROVAL:
        return None
    record = replace(record, state=JobState.QUEUED, queued_at=now, not_before=now)
    record = replace(record, due_at=_due(record, now))
    return JobStep(record, [_event(record, now, EventKind.JOB_QUEUED, {"reason": "its approval was decided"})])


def cancelled(record: JobRecord, now: float, by: str, ttl_s: float) -> JobStep | None:
    """Somebody cancels a job. One that runs is ended by its server, which confirms it."""
    if record.state.terminal or record.cancel:
        return None
    marked = replace(record, cancel=True)
    told = _event(record, now, EventKind.JOB_CANCELLING, {"by": by})
    if record.state is JobState.RUNNING:
        return JobStep(marked, [told])
    last = _end(marked, now, JobOutcome(JobState.CANCELLED, f"cancelled by {by} before it ran"), ttl_s)
    return JobStep(last.record, [told, *last.events])


def overdue(record: JobRecord, now: float, ttl_s: float) -> JobStep | None:
    """The time of a job that waits is over."""
    if record.state not in {JobState.QUEUED, JobState.WAITING_APPROVAL} or record.due_at is None or record.due_at > now:
        return None
    whole = _whole(record)
    if whole is not None and whole <= now:
        reason = "it was not done within timeouts.whole_s"
    elif record.facts.reason:
        reason = f"it could not start within timeouts.queue_s: {record.facts.reason}"
    else:
        reason = "it could not start within timeouts.queue_s"
    return _end(record, now, JobOutcome(JobState.TIMED_OUT, reason), ttl_s)


def abandoned(record: JobRecord, now: float, ttl_s: float, grace_s: float) -> JobStep | None:
    """The server of a job gave no sign of life for longer than its lease."""
    if record.state is not JobState.RUNNING or record.lease_until is None or record.lease_until > now - grace_s:
        return None
    return lost(record, now, f"the server '{record.owner}', which ran it, no longer answers", ttl_s)


def lost(record: JobRecord, now: float, reason: str, ttl_s: float) -> JobStep | None:
    """The server or the sandbox of a job died. If its work had not begun, it begins again."""
    if record.state is not JobState.RUNNING:
        return None
    if not record.facts.dispatched:
        return put_back(record, now, reason, 0.0, ttl_s)
    return ended(record, now, JobOutcome(JobState.LOST, reason), ttl_s)


def ended(record: JobRecord, now: float, outcome: JobOutcome, ttl_s: float) -> JobStep | None:
    """An attempt is over. The job has ended, or it is queued for the next attempt."""
    if record.state is not JobState.RUNNING:
        return None
    allowed = record.request.get("retries", 0)
    if not tried_again(record, outcome):
        return _end(record, now, outcome, ttl_s)
    tries = record.facts.tries + 1
    pause = min(LONGEST_BACKOFF_S, float(record.request.get("backoff_s", 1.0)) * 2.0 ** (tries - 1))
    reason = f"attempt {record.attempt} {_words(outcome)}; retry {tries} of {allowed}"
    facts = JobFacts(tries=tries, retry_of=record.facts.retry_of, reason=reason)
    queued = replace(
        record,
        state=JobState.QUEUED,
        owner=None,
        lease_until=None,
        approval=None,
        queued_at=now,
        not_before=now + pause,
        facts=facts,
    )
    queued = replace(queued, due_at=_due(queued, now + pause))
    return JobStep(queued, [_event(queued, now, EventKind.JOB_QUEUED, {"reason": reason, "pause_s": pause})])


def tried_again(record: JobRecord, outcome: JobOutcome) -> bool:
    """Whether a job is run again after an attempt that ended so."""
    left = record.request.get("retries", 0) - record.facts.tries
    return outcome.state in TRIED_AGAIN and not outcome.final and left > 0 and not record.cancel


def _words(outcome: JobOutcome) -> str:
    """Return an outcome as the end of a sentence."""
    said = outcome.state.value.replace("_", " ")
    return f"{said}: {outcome.reason}" if outcome.reason else said


def _end(record: JobRecord, now: float, outcome: JobOutcome, ttl_s: float) -> JobStep:
    given = record.request.get("ttl_s")
    facts = replace(
        record.facts,
        phase=None,
        reason=outcome.reason,
        resumes=False,
        result=None,
        ended_at=now,
        exit_code=outcome.exit_code,
        signal=outcome.signal,
        oom_killed=outcome.oom_killed,
    )
    record = replace(
        record,
        state=outcome.state,
        owner=None,
        lease_until=None,
        due_at=None,
        expires_at=now + (ttl_s if given is None else float(given)),
        webhook=now if record.request.get("webhook") else None,
        facts=facts,
    )
    told = {
        "state": outcome.state.value,
        "reason": outcome.reason,
        "exit_code": outcome.exit_code,
        "signal": outcome.signal,
        "attempt": record.attempt,
    }
    return JobStep(record, [_event(record, now, EventKind.JOB_ENDED, told)])


def _whole(record: JobRecord) -> float | None:
    whole = record.request.get("timeouts", {}).get("whole_s")
    return None if whole is None else record.created_at + float(whole)


def _due(record: JobRecord, since: float) -> float:
    """Return when a job that is queued since then is given up."""
    due = since + float(record.request.get("timeouts", {}).get("queue_s", 86_400.0))
    whole = _whole(record)
    return due if whole is None else min(due, whole)


def _event(record: JobRecord, now: float, kind: EventKind, values: Mapping[str, object]) -> EventDraft:
    body = body_of({"job": record.id, **values})
    return EventDraft(now, kind.value, record.context_id, record.facts.session_id, record.owner or "", body, record.id)


def removed(record: JobRecord, now: float) -> EventDraft:
    """Return the event that the record of a job is removed."""
    return _event(record, now, EventKind.JOB_REMOVED, {"state": record.state.value})


# showing


def summary_of(request: Mapping[str, Any]) -> str:
    """Return what a job runs, in one line."""
    if (command := request.get("command")) is not None:
        text = command if isinstance(command, str) else " ".join(str(part) for part in command)
    elif (python := request.get("python")) is not None:
        text = python["code"]
    else:
        call = request.get("mcp") or {}
        text = f"{call.get('server')}:{call.get('tool')}"
    line = " ".join(text.split())
    return line if len(line) <= 200 else f"{line[:199]}…"


def kind_of(request: Mapping[str, Any] | JobRequest) -> str:
    """Return what kind of work a job has."""
    given = request.model_dump(include={"command", "python", "mcp"}) if isinstance(request, JobRequest) else request
    return next(kind for kind in ("command", "python", "mcp") if given.get(kind) is not None)


def info_of(record: JobRecord) -> JobInfo:
    """Return a job as the API shows it."""
    facts = record.facts
    shown = {name: getattr(facts, name) for name in _SHOWN}
    return JobInfo.model_validate(
        {
            **shown,
            "id": record.id,
            "state": record.state,
            "context_id": record.context_id,
            "own_workspace": record.own_workspace,
            "kind": kind_of(record.request),
            "summary": summary_of(record.request),
            "labels": record.request.get("labels", {}),
            "priority": record.priority,
            "attempt": record.attempt,
            "retries": record.request.get("retries", 0),
            "created_at": record.created_at,
            "expires_at": record.expires_at,
            "approval": record.approval if record.state is JobState.WAITING_APPROVAL else None,
            "node": record.owner,
            "submitted_by": record.subject,
            "cancel_requested": record.cancel,
            "output_bytes": facts.output,
            "dropped_bytes": facts.dropped,
            "memory_peak_bytes": facts.memory_peak,
        }
    )


_SHOWN = (
    "phase", "reason", "started_at", "ended_at", "exit_code", "signal", "oom_killed", "progress", "progress_at",
    "session_id", "retry_of", "snapshot", "artifacts", "queued_ms", "starting_ms", "running_ms", "archiving_ms",
    "cpu_seconds",
)  # fmt: skip


# choosing


def share(queues: Mapping[str, Queue], free: int, *, at_once: int | None, rate: int | None) -> list[JobRecord]:
    """Choose the jobs that start: one after the other from the namespace that has the fewest running, in the order of
    each queue. No namespace gets more than `at_once` running jobs, and more than `rate` starts in the recent time.
    """
    running = {name: queue.running for name, queue in queues.items()}
    taken = dict.fromkeys(queues, 0)
    chosen: list[JobRecord] = []
    while len(chosen) < free:
        open_ones = [
            name
            for name, queue in queues.items()
            if taken[name] < len(queue.waiting)
            and (at_once is None or running[name] < at_once)
            and (rate is None or queue.recent + taken[name] < rate)
        ]
        if not open_ones:
            break
        name = min(open_ones, key=lambda each: (running[each], each))
        chosen.append(queues[name].waiting[taken[name]])
        taken[name] += 1
        running[name] += 1
    return chosen
