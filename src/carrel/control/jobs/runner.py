"""Runs the jobs of one server: claims them from the queue, follows them, and writes how they ended.

Whatever dies, a job is found again: by its server after a restart, or by another one when its lease has ended.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar

from pydantic import ValidationError

from carrel.config import JobSettings
from carrel.control.governance.open_requests import OpenRequests
from carrel.control.jobs import lifecycle
from carrel.control.jobs.executor import JobExecutor, PersonNeeded, Work
from carrel.control.jobs.lifecycle import JobOutcome
from carrel.control.jobs.watch import JobWatch
from carrel.control.nodes.workers import Worker, server_of
from carrel.errors import (
    CarrelError,
    Denied,
    LimitExceeded,
    NodeUnreachable,
    NotRunning,
    PlatformError,
    RunsElsewhere,
    SandboxLost,
    Unauthorized,
)
from carrel.identity import ROOT, Tokens
from carrel.metrics import JobUse, Metrics
from carrel.models import JobRequest, JobState, JobWorkspace
from carrel.primitives import tasks
from carrel.primitives.backoff import Backoff
from carrel.store.jobs import Decide, JobFacts, JobRecord, JobStep, JobStore, OutputPiece, Start

log = logging.getLogger("carrel.jobs")

T = TypeVar("T")

FLUSH_S = 0.5
"""How often output and progress of a running job are written."""
LOOK_S = 1.0
SHARED_LOOK_S = 0.3
"""How often a server looks for jobs that others submitted, and for what nobody tells it."""
REST_S = 5.0
"""How often a worker looks for jobs whose time has come, when no worker of its server has changed any job."""
GATHER_S = 0.02
"""While many jobs run, so long others may end too before new ones are claimed."""
AGAIN_S = 2.0
"""The pause of a job that could not start for want of room, or because its sandbox was just ending."""
MOST_FAILED_STARTS = 2
"""After so many failed starts of its sandbox the next one ends the attempt: nothing of the work has run until then."""
RECENT_S = 60.0
MOST_HELD = 4 * 1024 * 1024
"""When this many bytes of a job's output are in memory, they are written before more is read."""
PIECE = 256 * 1024
CLOSING_S = 5.0


class _Run:
    """One attempt that this server runs."""

    def __init__(self, work: Work, now: float):
        self.work = work
        self.claimed = time.monotonic()
        self.began = self.claimed
        self.task: asyncio.Task[None] | None = None
        self.stop: JobOutcome | None = None
        """How it ends because it is stopped."""
        self.stopping: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.fenced = False
        """Whether another server may have the job by now."""
        self.pieces: list[OutputPiece] = []
        self.held = 0
        self.length = work.record.facts.output
        self.raw = work.record.facts.raw
        self.last_sign = time.monotonic()
        self.listened = self.last_sign
        self.beat: int | None = None
        self.facts: dict[str, Any] = {}
        """What is to be written about it."""
        self.started_at = now
        self.artifacts: dict[str, Any] | None = None

    @property
    def record(self) -> JobRecord:
        return self.work.record

    def end_with(self, outcome: JobOutcome) -> None:
        """Stop it. The first reason holds."""
        if self.stop is None:
            self.stop = outcome
            if not self.stopping.done():
                self.stopping.set_result(None)

    def take(self, stream: str, data: bytes, raw: int) -> None:
        """Keep a piece of output until it is written."""
        self.raw += raw
        if not data:
            return
        last = self.pieces[-1] if self.pieces else None
        if last is not None and last.stream == stream and len(last.data) + len(data) <= PIECE:
            self.pieces[-1] = OutputPiece(last.start, stream, last.data + data, self.raw)
        else:
            self.pieces.append(OutputPiece(self.length, stream, data, self.raw))
        self.length += len(data)
        self.held += len(data)
        self.last_sign = time.monotonic()

    def taken(self) -> list[OutputPiece]:
        """Return the output that is not written yet; it is written now."""
        pieces, self.pieces, self.held = self.pieces, [], 0
        return pieces


class _Looks:
    """Which looks into the database are needed: none if the workers of this server, which alone write to it, changed
    nothing since the last one.
    """

    def __init__(self, changes: Callable[[], int | None]):
        self._changes = changes
        self._seen: int | None = None
        self._until = 0.0

    def needed(self) -> bool:
        """Whether to look now."""
        now = self._changes()
        if now is not None and now == self._seen and time.monotonic() < self._until:
            return False
        self._seen = now
        self._until = time.monotonic() + REST_S
        return True

    def due_in(self, seconds: float) -> None:
        """Look again after that time at the latest."""
        self._until = min(self._until, time.monotonic() + seconds)


class JobRunner:
    """The jobs that run on this server."""

    def __init__(
        self,
        settings: JobSettings,
        store: JobStore,
        executor: JobExecutor,
        tokens: Tokens,
        requests: OpenRequests,
        metrics: Metrics,
        watch: JobWatch,
        worker: Worker,
        lease_s: float,
    ):
        self._settings = settings
        self._store = store
        self._executor = executor
        self._tokens = tokens
        self._requests = requests
        self._metrics = metrics
        self._watch = watch
        self._worker = worker
        self._node = worker.name
        self._at_once = max(1, worker.share(settings.at_once))
        self._lease_s = lease_s
        self._runs: dict[str, _Run] = {}
        self._more = True
        """Whether jobs may be left in the queue that only wait for the end of another."""
        self._held = 0
        """Places of jobs that are being stored, and may start at once."""
        self._strays: Set[str] = set()
        """The jobs of this server that had no run when the leases were renewed last."""
        self._wake = asyncio.Event()
        self._queue_looks = _Looks(worker.job_changes)
        self._other_looks = _Looks(worker.job_changes)
        self._closing = False
        self._loops: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Go on with the jobs that the process before had, and begin to claim others."""
        for record in await self._store.running():
            if not self._worker.recovers(record.owner) or not self._of_this_server(record.owner):
                continue
            adopt = partial(lifecycle.adopted, former=record.owner, owner=self._node, lease_s=self._lease_s)
            adopted = await self._change(record.id, adopt)
            if adopted is not None:
                self._begin(adopted, self._adopted)
        loop = asyncio.get_running_loop()
        self._loops = [
            loop.create_task(self._repeat(self._claim, 0.0)),
            loop.create_task(self._repeat(self._look, SHARED_LOOK_S if self._store.shared else LOOK_S)),
            loop.create_task(self._repeat(self._renew, self._lease_s / 3)),
        ]

    async def close(self) -> list[str]:
        """Leave the jobs: what runs in sandboxes goes on, and the next process takes it over. Returns the sessions that
        must not end. A second time does no harm.
        """
        if self._closing:
            return []
        self._closing = True
        await tasks.cancel(self._loops)
        runs = list(self._runs.values())
        if runs:
            for run in runs:
                if run.task is not None:
                    run.task.cancel()
            await asyncio.wait([run.task for run in runs if run.task is not None], timeout=CLOSING_S)
        kept = []
        for run in runs:
            record, box = run.record, run.work.box
            if record.state is not JobState.RUNNING or run.fenced:
                continue
            if not run.work.begun:
                reason = "its server was stopped before it began"
                with suppress(CarrelError):
                    await self._change(record.id, self._put_back(reason=reason, pause_s=0.0), record)
            elif box is not None and run.work.request.mcp is None:
                kept.append(box.record.id)
        await self._store.close()
        known = {run.record.id for run in runs}
        with suppress(CarrelError):  # a claim that was committed after all: nobody began with it
            for record in await self._store.running():
                if record.owner == self._node and record.id not in known:
                    reason = "its server was stopped before it began"
                    await self._change(record.id, self._put_back(reason=reason, pause_s=0.0), record)
        if kept:
            log.info("%d jobs go on in their sandboxes, until the server is back", len(kept))
        return kept

    def _of_this_server(self, owner: str | None) -> bool:
        return owner is not None and server_of(owner) == self._worker.server

    def starting(self, record: JobRecord, request: JobRequest) -> AbstractContextManager[Start | None]:
        """Yield what lets a job start while it is stored, or None if it has to wait in the queue. Its place is kept for
        the length of the block.
        """
        limited = self._settings.per_namespace is not None or self._settings.starts_per_minute is not None
        free = self._at_once - len(self._runs) - self._held
        if limited or free <= 0 or self._closing or not self._executor.ready(record, request):
            return nullcontext(None)
        return self._place()

    @contextmanager
    def _place(self) -> Iterator[Start]:
        self._held += 1
        try:
            yield self._claimed
        finally:
            self._held -= 1

    def started(self, record: JobRecord, request: JobRequest) -> None:
        """Run a job that has started while it was stored. A server that stops puts it back, see `close`."""
        if not self._closing:
            self._go(_Run(Work(record, request, ROOT), time.time()), self._fresh)

    def wake(self) -> None:
        """Look at the queue now: there is something new."""
        self._wake.set()

    def cancel(self, job_id: str) -> None:
        """End a job that was cancelled, if it runs here."""
        run = self._runs.get(job_id)
        if run is not None:
            run.end_with(JobOutcome(JobState.CANCELLED, lifecycle.CANCELLED))

    # the loops

    async def _repeat(self, work: Callable[[], Any], pause_s: float) -> None:
        backoff = Backoff(0.2, 5.0)
        while True:
            await asyncio.sleep(pause_s)
            try:
                await work()
                backoff.reset()
            except Exception as error:
                if isinstance(error, CarrelError):
                    log.warning("jobs have to wait: %s", error)
                else:
                    log.exception("jobs have to wait")
                await asyncio.sleep(backoff.next_pause())

    async def _claim(self) -> None:
        """Wait until something may start, and start it."""
        try:
            async with asyncio.timeout(SHARED_LOOK_S if self._store.shared else LOOK_S):
                await self._wake.wait()
            self._wake.clear()
        except TimeoutError:
            if not self._queue_looks.needed():
                return
            due = await self._store.next_start()
            if due is not None:
                self._queue_looks.due_in(due)
            if due is None or due > 0:
                return
        if len(self._runs) > self._at_once // 2:
            await asyncio.sleep(GATHER_S)
        at_once, rate = self._settings.per_namespace, self._settings.starts_per_minute
        self._more = True
        while (free := self._at_once - len(self._runs) - self._held) > 0:
            choose = partial(lifecycle.share, free=free, at_once=at_once, rate=rate)
            recent_s = None if rate is None else RECENT_S
            found = await self._store.claim(
                self._node, self._worker.server, free, choose, self._claimed, recent_s=recent_s
            )
            for record in found:
                self._begin(record, self._fresh)
            if len(found) < free:
                self._more = at_once is not None  # else the end of a job lets no other start
                return

    def _claimed(self, record: JobRecord, now: float) -> JobStep:
        request = _request_of(record)
        ready = request is not None and self._executor.ready(record, request)
        return lifecycle.claimed(record, now, self._node, self._lease_s, dispatched=ready)

    async def _look(self) -> None:
        """Find jobs that wait for something that has happened meanwhile."""
        if not self._other_looks.needed():
            return
        for job_id in await self._store.decided():
            if await self._change(job_id, lifecycle.decided) is not None:
                self.wake()
        for job_id in await self._store.overdue():
            await self._change(job_id, partial(lifecycle.overdue, ttl_s=self._settings.ttl_s))
        for job_id in await self._store.cancelled(self._node):  # through another server, or just when it was claimed
            self.cancel(job_id)

    async def _renew(self) -> None:
        """Keep the leases of this server, and find the jobs of servers that have died."""
        held = await self._store.renew(self._node, self._lease_s)
        for job_id, run in list(self._runs.items()):
            mine = held.get(job_id)
            if mine is not None and mine.fence == run.record.fence:
                if mine.cancel:
                    self.cancel(job_id)
            elif run.record.state is JobState.RUNNING and not run.fenced and run.task is not None:
                log.warning("job %s is not this server's any more: it is ended here", job_id)
                run.fenced = True
                run.end_with(JobOutcome(JobState.LOST))
        strays = held.keys() - self._runs.keys()
        for job_id in strays & self._strays:  # nobody here knows of it any more: that must not keep it from its end
            adopt = partial(lifecycle.adopted, former=self._node, owner=self._node, lease_s=self._lease_s)
            if (adopted := await self._change(job_id, adopt)) is not None:
                self._begin(adopted, self._adopted)
        self._strays = strays
        grace = self._lease_s / 3
        for job_id in await self._store.abandoned(grace, self._worker.names):
            if job_id not in self._runs:
                decide = partial(lifecycle.abandoned, ttl_s=self._settings.ttl_s, grace_s=grace)
                if await self._change(job_id, decide) is not None:
                    self.wake()

    async def _change(self, job_id: str, decide: Decide, known: JobRecord | None = None) -> JobRecord | None:
        record = await self._store.change(job_id, decide, known)
        if record is not None:
            self._watch.changed(record)
        return record

    # one job

    def _begin(self, record: JobRecord, go: Callable[[_Run], Any]) -> None:
        request = _request_of(record)
        if request is None:
            request, go = JobRequest.model_construct(command="?"), self._unreadable
        self._go(_Run(Work(record, request, ROOT), time.time()), go)

    def _go(self, run: _Run, go: Callable[[_Run], Any]) -> None:
        self._runs[run.record.id] = run
        self._watch.changed(run.record)
        run.task = asyncio.get_running_loop().create_task(self._guard(run, go))

    async def _guard(self, run: _Run, go: Callable[[_Run], Any]) -> None:
        """Run a job, and let nothing that goes wrong keep it from a visible end."""
        try:
            try:
                await self._with_identity(run, go)
            except Exception as error:
                if isinstance(error, CarrelError):
                    outcome = self._failed(run, error)
                else:
                    log.exception("job %s failed unexpectedly", run.record.id)
                    outcome = JobOutcome(JobState.LOST, "carrel failed; the log of the server says how")
                if outcome is not None:
                    await self._finish(run, outcome)
        finally:
            run.work.close()
            self._runs.pop(run.record.id, None)
            if self._more:
                self._wake.set()

    async def _with_identity(self, run: _Run, go: Callable[[_Run], Any]) -> None:
        """Run a job with the identity of its submitter, for as long as the token is valid."""
        if run.record.token_id is None:
            await go(run)
            return
        token_id = run.record.token_id
        run.work.identity = await self._stubborn(lambda: self._tokens.of_id(token_id))
        opened = self._requests.open(run.work.identity)
        assert opened is not None
        words = "the token of its submitter was revoked or has expired"
        opened.stays_open(lambda: run.end_with(JobOutcome(JobState.FAILED, words, final=True)))
        try:
            await go(run)
        finally:
            opened.close()

    def _failed(self, run: _Run, error: CarrelError) -> JobOutcome | None:
        """Return how a job ends that an error kept from going on; None if it has to wait instead."""
        if isinstance(error, SandboxLost | PlatformError) and run.work.begun:
            return JobOutcome(JobState.LOST, f"its sandbox died: {error.detail}")
        final = error.status < 500
        if isinstance(error, Unauthorized):
            return JobOutcome(JobState.FAILED, "the token of its submitter was revoked or has expired", final=True)
        if isinstance(error, Denied):
            return JobOutcome(JobState.FAILED, f"it was refused: {error.detail}", final=True)
        return JobOutcome(JobState.FAILED, f"it could not be started: {error.detail}", final=final)

    async def _fresh(self, run: _Run) -> None:
        work = run.work
        try:
            if not work.record.facts.dispatched:
                await self._unless_stopped(run, self._executor.prepare(work))
                if run.stop is None:
                    session = None if work.box is None else work.box.record.id
                    await self._note(run, {"dispatched": True, "session_id": session})
            if run.stop is None:
                await self._executor.begin(work)
        except PersonNeeded as needed:
            asked = self._asked(needed)
            await self._leave(run, asked)
            return
        except (LimitExceeded, NotRunning, RunsElsewhere, NodeUnreachable, SandboxLost) as error:
            if work.begun:
                raise
            await self._leave(run, self._put_back(reason=error.detail, pause_s=AGAIN_S))
            asyncio.get_running_loop().call_later(AGAIN_S, self.wake)
            return
        except PlatformError as error:
            if work.begun:
                raise
            if self._closing:
                return
            if work.record.facts.failed_starts >= MOST_FAILED_STARTS:
                raise
            reason = f"its sandbox did not start, and is tried again: {error.detail}"
            await self._leave(run, self._put_back(reason=reason, pause_s=AGAIN_S, failed_start=True))
            asyncio.get_running_loop().call_later(AGAIN_S, self.wake)
            return
        if run.stop is not None and not work.begun:
            await self._finish(run, run.stop)
            return
        await self._follow(run)

    async def _unless_stopped(self, run: _Run, work: Any) -> None:
        """Wait for something that may take long, unless the job is stopped meanwhile."""
        doing = asyncio.ensure_future(work)
        try:
            await asyncio.wait({doing, run.stopping}, return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                doing.result()
        finally:
            await tasks.cancel([doing])

    def _asked(self, needed: PersonNeeded) -> Decide:
        return partial(
            lifecycle.asked,
            approval=needed.approval,
            operation=needed.operation,
            step=needed.step,
            ttl_s=self._settings.ttl_s,
        )

    def _put_back(self, reason: str, pause_s: float, *, failed_start: bool = False) -> Decide:
        return partial(
            lifecycle.put_back,
            reason=reason,
            pause_s=pause_s,
            ttl_s=self._settings.ttl_s,
            failed_start=failed_start,
        )

    async def _leave(self, run: _Run, decide: Decide) -> None:
        """Give the job back to the queue, or let it wait for a person."""
        record = await self._stubborn(lambda: self._store.change(run.record.id, decide, run.record))
        if record is not None:
            run.work.record = record
            self._watch.changed(record)

    async def _unreadable(self, run: _Run) -> None:
        reason = "this version of carrel cannot read the job, which another one accepted"
        await self._finish(run, JobOutcome(JobState.FAILED, reason, final=True))

    async def _adopted(self, run: _Run) -> None:
        """Go on with a job that the process before had begun."""
        work, facts = run.work, run.record.facts
        work.begun = facts.dispatched
        if facts.result is not None:
            work.begun = True
            await self._finish(run, JobOutcome(**{**facts.result, "state": JobState(facts.result["state"])}))
            return
        found = None
        if facts.dispatched:
            found = await self._executor.find(work)
        if found is None and facts.dispatched:
            reason = "the server was restarted, and the sandbox does not run any more"
            await self._finish(run, JobOutcome(JobState.LOST, reason))
        elif not found:
            await self._leave(run, self._put_back(reason="the server was restarted before it began", pause_s=0.0))
            self.wake()
        else:
            work.begun = True
            if run.record.cancel:
                self.cancel(run.record.id)
            await self._follow(run)

    async def _follow(self, run: _Run) -> None:
        """Follow the work to its end, or end it where a timeout or somebody says so."""
        work = run.work
        run.began = time.monotonic()
        facts = run.record.facts
        run.started_at = facts.started_at or time.time()
        run.facts |= {"phase": "running", "started_at": run.started_at, "reason": None}
        if facts.starting_ms is None:
            run.facts["starting_ms"] = (run.began - run.claimed) * 1000
        if work.box is not None:
            run.facts["session_id"] = work.box.record.id
        reading: asyncio.Future[Any] = asyncio.ensure_future(self._read(run))
        try:
            while not reading.done():
                await asyncio.wait(
                    {reading, run.stopping}, timeout=self._next_look(run), return_when=asyncio.FIRST_COMPLETED
                )
                if reading.done():
                    break
                if run.stop is None:
                    await self._listen(run)
                    self._check_times(run)
                if run.stop is not None:
                    await self._end_work(run, reading)
                    break
                await self._flush(run)
            end = reading.result() if reading.done() and not reading.cancelled() else None
        except PersonNeeded as needed:
            asked = self._asked(needed)
            await self._leave(run, asked)
            return
        except CarrelError:
            if run.stop is None:
                raise
            end = None  # it was ended, and its sandbox too
        finally:
            await tasks.cancel([reading])
        await self._finish(run, self._outcome(run, end))

    async def _read(self, run: _Run) -> dict[str, Any]:
        """Read the output until the work has ended, and return how."""
        async with aclosing(self._executor.output(run.work, run.raw)) as chunks:
            async for chunk in chunks:
                if chunk.stream == "end":
                    end: dict[str, Any] = json.loads(chunk.data)
                    return end
                run.take(chunk.stream, chunk.data, len(chunk.data) if chunk.raw is None else chunk.raw)
                while run.held >= MOST_HELD:
                    await self._flush(run)
        raise SandboxLost("the sandbox ended the output in the middle")

    async def _listen(self, run: _Run) -> None:
        """Look whether the job says how far it is. Jobs that are over soon are not asked."""
        now = time.monotonic()
        if now - run.listened < LOOK_S:
            return
        run.listened = now
        with suppress(CarrelError):
            said = await self._executor.heartbeat(run.work)
            if said is not None and said.beat != run.beat:
                run.beat, run.last_sign = said.beat, time.monotonic()
                run.facts |= {"progress": said.text, "progress_at": time.time()}

    def _next_look(self, run: _Run) -> float:
        """Return the seconds until something has to be written or checked."""
        now, timeouts = time.monotonic(), run.work.request.timeouts
        waits = [FLUSH_S if run.pieces or run.facts else LOOK_S, run.began + self._run_s(run) - now]
        if timeouts.heartbeat_s is not None:
            waits.append(run.last_sign + timeouts.heartbeat_s - now)
        return max(0.01, min(waits))

    def _run_s(self, run: _Run) -> float:
        """Return how long the work may run from its beginning here."""
        timeouts = run.work.request.timeouts
        ran = time.time() - (time.monotonic() - run.began) - run.started_at  # under the process before
        left = timeouts.run_s - max(0.0, ran)
        if timeouts.whole_s is not None:
            left = min(left, run.record.created_at + timeouts.whole_s - time.time() + time.monotonic() - run.began)
        return left

    def _check_times(self, run: _Run) -> None:
        now, timeouts = time.monotonic(), run.work.request.timeouts
        if now >= run.began + self._run_s(run):
            if timeouts.whole_s is not None and time.time() >= run.record.created_at + timeouts.whole_s:
                run.end_with(JobOutcome(JobState.TIMED_OUT, "it was not done within timeouts.whole_s", final=True))
            else:
                run.end_with(JobOutcome(JobState.TIMED_OUT, "it ran longer than timeouts.run_s"))
        elif timeouts.heartbeat_s is not None and now - run.last_sign >= timeouts.heartbeat_s:
            words = f"it is stuck: no output and no heartbeat for {timeouts.heartbeat_s:g} s"
            run.end_with(JobOutcome(JobState.TIMED_OUT, words))

    async def _end_work(self, run: _Run, reading: asyncio.Future[dict[str, Any]]) -> None:
        """End the work with all its processes."""
        with suppress(CarrelError):
            await self._note(run, {"phase": "stopping"})
        await self._executor.stop(run.work, self._settings.grace_s)
        if not reading.done():  # the end of the output is on its way, unless the sandbox is gone
            await asyncio.wait({reading}, timeout=1.0)

    def _outcome(self, run: _Run, end: Mapping[str, Any] | None) -> JobOutcome:
        if end is not None:
            run.facts["dropped"] = end.get("dropped", 0)
        if run.stop is not None:
            shown = {} if end is None else {"exit_code": end["exit_code"], "signal": end["signal"]}
            return replace(run.stop, **shown)
        assert end is not None
        how = {"exit_code": end["exit_code"], "signal": end["signal"], "oom_killed": bool(end["oom_killed"])}
        if end["timed_out"]:
            return JobOutcome(JobState.TIMED_OUT, "it ran longer than timeouts.run_s or than the policy allows", **how)
        if end["oom_killed"]:
            return JobOutcome(JobState.FAILED, "the sandbox ran out of memory", **how)
        if end["signal"] is not None:
            return JobOutcome(JobState.FAILED, f"a signal ended it: {end['signal']}", **how)
        if end["exit_code"] == 0:
            return JobOutcome(JobState.SUCCEEDED, **how)
        return JobOutcome(JobState.FAILED, f"exit code {end['exit_code']}", **how)

    # writing

    async def _note(self, run: _Run, facts: dict[str, Any]) -> None:
        run.facts |= facts
        await self._flush(run)

    async def _flush(self, run: _Run) -> None:
        """Write the output and the facts that have come since the last time."""
        if not run.pieces and not run.facts:
            return
        pieces, facts = run.taken(), run.facts | {"output": run.length, "raw": run.raw}
        run.facts = {}
        decide = partial(lifecycle.noted, facts=facts)
        record = await self._stubborn(lambda: self._store.conclude(run.record, decide, pieces))
        if record is not None:
            run.work.record = record
            self._watch.changed(record)

    async def _finish(self, run: _Run, outcome: JobOutcome) -> None:
        """Put the results away, and write the end of the attempt."""
        if run.fenced:
            return
        began, facts = time.monotonic(), run.record.facts
        last = not lifecycle.tried_again(run.record, outcome)
        if run.work.begun and facts.result is None:
            run.facts["running_ms"] = max(0.0, (time.time() - run.started_at) * 1000)
        if last and self._has_results(run):
            if facts.result is None:
                await self._note(
                    run, {"phase": "archiving", "result": {**asdict(outcome), "state": outcome.state.value}}
                )
            outcome = await self._archive(run, outcome)
            run.facts["archiving_ms"] = (time.monotonic() - began) * 1000
        pieces = run.taken()
        written = {**run.facts, "output": run.length, "raw": run.raw}

        def end(record: JobRecord, now: float) -> JobStep | None:
            if record.state is not JobState.RUNNING:
                return None
            noted = replace(record, facts=replace(record.facts, **written))
            return lifecycle.ended(noted, now, outcome, self._settings.ttl_s)

        record = await self._stubborn(lambda: self._store.conclude(run.record, end, pieces, run.artifacts))
        if record is None:
            return
        before, run.work.record = replace(run.record, facts=replace(run.record.facts, **written)), record
        self._watch.changed(record)
        self._count(run, before.facts, outcome)
        if record.state is JobState.QUEUED:
            asyncio.get_running_loop().call_later(max(0.0, record.not_before - time.time()), self.wake)

    def _count(self, run: _Run, facts: JobFacts, outcome: JobOutcome) -> None:
        """Set the metrics of an attempt that has ended."""
        if outcome.oom_killed:
            exit = "out_of_memory"
        elif outcome.signal is not None:
            exit = "signaled"
        else:
            exit = "none" if outcome.exit_code is None else "failed" if outcome.exit_code else "ok"
        state = "retried" if run.record.state is JobState.QUEUED else outcome.state.value
        phases = {
            "queued": facts.queued_ms,
            "starting": facts.starting_ms,
            "running": facts.running_ms,
            "archiving": facts.archiving_ms,
        }
        request = run.work.request
        brought = (len(request.stdin or ""), *(3 * len(text) // 4 for text in request.files.values()))
        used = JobUse(facts.cpu_seconds, facts.memory_peak, sum(brought), facts.output)
        self._metrics.job_attempt_ended(state, exit, request.template or "", phases, used)

    def _has_results(self, run: _Run) -> bool:
        request = run.work.request
        return run.work.begun and bool(request.artifacts or request.snapshot or run.record.own_workspace)

    async def _archive(self, run: _Run, outcome: JobOutcome) -> JobOutcome:
        """List the artifacts, take the snapshot, end the sandbox that was made for the job. What fails is said in the
        reason, and does not change how the job ended.
        """
        request, failed = run.work.request, []
        if request.artifacts:
            try:
                files, more = await self._executor.artifacts(run.work)
                shown = [file.model_dump(mode="json") for file in files]
                run.artifacts = {"files": shown, "truncated": more}
                run.facts["artifacts"] = len(files)
            except CarrelError as error:
                failed.append(f"the artifacts could not be listed: {error.detail}")
        if request.snapshot:
            try:
                run.facts["snapshot"] = await self._executor.snapshot(run.work)
            except CarrelError as error:
                failed.append(f"no snapshot could be taken: {error.detail}")
        if run.record.own_workspace:
            with suppress(CarrelError):
                run.facts["cpu_seconds"], run.facts["memory_peak"] = await self._executor.used(run.work)
            try:
                await self._executor.dismiss(run.work, remove=request.workspace is JobWorkspace.REMOVE)
            except CarrelError as error:
                failed.append(f"its sandbox could not be ended: {error.detail}")
        if not failed:
            return outcome
        return replace(outcome, reason="; ".join(([outcome.reason] if outcome.reason else []) + failed))

    async def _stubborn(self, work: Callable[[], Awaitable[T]]) -> T:
        """Work with the database, and try again while it is away: the end of a job must not get lost."""
        backoff = Backoff(0.1, 2.0)
        while True:
            try:
                return await work()
            except PlatformError as error:
                if self._closing:
                    raise
                log.warning("a job has to wait: %s", error)
                await asyncio.sleep(backoff.next_pause())


def _request_of(record: JobRecord) -> JobRequest | None:
    """Return what was asked for; None if another version of carrel accepted it and this one cannot read it."""
    try:
        return JobRequest.model_validate(dict(record.request))
    except ValidationError:
        return None
