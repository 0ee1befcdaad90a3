"""The queries on jobs. Knows no rules: `control/jobs/lifecycle.py` decides what becomes of a job.

All times are those of the database. A change reads its row and writes it, with the events of the change, in one
transaction; a fence that is no longer the newest changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Select, and_, bindparam, delete, exists, func, insert, not_, or_, select, update
from sqlalchemy.engine import Connection, RowMapping

from carrel.models import ApprovalState, JobState, State
from carrel.models.events import EventDraft
from carrel.store.clock import clock_of, database_clock
from carrel.store.cursors import read_page
from carrel.store.database import Database
from carrel.store.grouped import GroupedWrites
from carrel.store.tables import approvals, job_artifacts, job_output, jobs, nodes, sessions

MOST_NAMESPACES = 64
"""Namespaces that one claim looks at; the next one looks at others."""
_MOST = 200
LARGE = 64 * 1024
PAGE_BYTES = 1024 * 1024
"""Bytes of output that are read at once."""


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What became of a job, and what its next attempt needs to know."""

    phase: str | None = None
    reason: str | None = None
    resumes: bool = False
    """Whether the next claim goes on with the same attempt, because its work has not begun."""
    dispatched: bool = False
    """Whether the work of the attempt may have begun."""
    claim: int = 0
    """The fence of the claim: the sandbox is asked by it whether the work began."""
    tries: int = 0
    """Retries that were used."""
    failed_starts: int = 0
    """How often its sandbox failed to start in a row."""
    step: int = 0
    """Steps before the work that are done: a person may have been asked for each."""
    operation: str | None = None
    """The operation that the approval is for."""
    session_id: str | None = None
    started_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    signal: str | None = None
    oom_killed: bool = False
    progress: str | None = None
    progress_at: float | None = None
    output: int = 0
    raw: int = 0
    dropped: int = 0
    snapshot: str | None = None
    artifacts: int | None = None
    queued_ms: float | None = None
    starting_ms: float | None = None
    running_ms: float | None = None
    archiving_ms: float | None = None
    cpu_seconds: float | None = None
    memory_peak: int | None = None
    retry_of: str | None = None
    result: dict[str, Any] | None = None
    """How the work ended, while its results are put away."""
    told: int = 0
    """Attempts to reach the webhook that failed."""


_DEFAULT = {each.name: each.default for each in fields(JobFacts)}
_FACTS = frozenset(_DEFAULT)


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A row of the table of jobs."""

    id: str
    namespace: str
    context_id: str
    own_workspace: bool
    state: JobState
    priority: int
    attempt: int
    fence: int
    created_at: float
    queued_at: float
    not_before: float
    request: Mapping[str, Any]
    subject: str
    claimed_at: float | None = None
    due_at: float | None = None
    expires_at: float | None = None
    owner: str | None = None
    lease_until: float | None = None
    cancel: bool = False
    approval: str | None = None
    token_id: str | None = None
    idempotency_key: str | None = None
    webhook: float | None = None
    facts: JobFacts = field(default_factory=JobFacts)


class JobStep(NamedTuple):
    """What becomes of a job: its new record, and the events that tell it."""

    record: JobRecord
    events: Sequence[EventDraft] = ()


Decide = Callable[[JobRecord, float], JobStep | None]
"""Returns what becomes of a job at a time; None if nothing does."""


Start = Callable[[JobRecord, float], JobStep]
"""Returns the step by which a job that was queued just now starts at once."""


class HeldJob(NamedTuple):
    """A job whose lease was renewed. `cancel`: somebody has cancelled it, maybe through another server."""

    fence: int
    cancel: bool


class OutputPiece(NamedTuple):
    """A piece of the output of a job, without secrets. `raw` is its end in the output of the sandbox."""

    start: int
    stream: str
    data: bytes
    raw: int


class Queue(NamedTuple):
    """The jobs of a namespace that can start, in their order, and how many run and were started lately."""

    waiting: Sequence[JobRecord]
    running: int
    recent: int


Share = Callable[[Mapping[str, Queue]], list[JobRecord]]
"""Chooses the jobs that start, from those of each namespace."""


def _record(row: RowMapping) -> JobRecord:
    facts = JobFacts(**{name: value for name, value in row["facts"].items() if name in _FACTS})
    return JobRecord(**{**row, "state": JobState(row["state"]), "facts": facts})


def _row(record: JobRecord) -> dict[str, Any]:
    values = {name: getattr(record, name) for name in _NAMES}
    facts = {name: value for name in _FACTS if (value := getattr(record.facts, name)) is not _DEFAULT[name]}
    return {**values, "state": record.state.value, "request": dict(record.request), "facts": facts}


_NAMES = tuple(each.name for each in fields(JobRecord))
_CONSTANT = frozenset({"id", "namespace", "context_id", "own_workspace", "priority", "created_at", "request"})
_CLOCK = database_clock().label("clock")


class JobStore:
    """Reads and writes jobs, their output and their artifacts."""

    def __init__(self, database: Database):
        self._database = database
        self._grouped = GroupedWrites(database)
        self._turn = 0
        self.shared = database.polled
        """Whether other servers, or other workers of this one, may have jobs too."""

    async def close(self) -> None:
        """Wait until everything is written."""
        await self._grouped.close()

    # one job

    async def insert(
        self, decide: Callable[[JobRecord, float], JobStep], record: JobRecord, start: Start | None = None
    ) -> tuple[JobRecord, bool]:
        """Add a job as `decide` makes it; return it and True, or the one with the same idempotency key and False. Where
        no other job waits for its turn, `start` lets it start in the same transaction.
        """

        def run(connection: Connection) -> tuple[tuple[JobRecord, bool], Sequence[EventDraft]]:
            now = clock_of(connection)
            made, events = decide(record, now)
            if start is not None and connection.execute(_WAITING, {"now": now}).first() is None:
                made, more = start(made, now)
                events = [*events, *more]
            if record.idempotency_key is None:
                connection.execute(insert(jobs), _row(made))
                return (made, True), events
            dialect = import_module(f"sqlalchemy.dialects.{connection.dialect.name}")
            if connection.execute(dialect.insert(jobs).on_conflict_do_nothing(), _row(made)).rowcount == 1:
                return (made, True), events
            query = select(jobs).where(jobs.c.idempotency_key == record.idempotency_key)
            return (_record(connection.execute(query).mappings().one()), False), ()

        return await self._grouped.write("", run)

    async def change(self, job_id: str, decide: Decide, known: JobRecord | None = None) -> JobRecord | None:
        """Let a job become what `decide` returns; return its new record, or None if nothing changed: it is gone, or
        `decide` says so. `known` is what its server knows of it: a fence that is not the newest changes nothing.
        """
        return await self._grouped.write(job_id, lambda connection: self._change(connection, job_id, decide, known))

    async def conclude(
        self,
        known: JobRecord,
        decide: Decide,
        output: Sequence[OutputPiece],
        artifacts: Mapping[str, Any] | None = None,
    ) -> JobRecord | None:
        """Like `change`, with output of its attempt and the artifacts in the same transaction."""
        job_id = known.id

        def run(connection: Connection) -> tuple[JobRecord | None, Sequence[EventDraft]]:
            changed = self._change(connection, job_id, decide, known)
            if changed[0] is not None:
                _write_output(connection, job_id, known.attempt, output)
                if artifacts is not None:
                    connection.execute(delete(job_artifacts).where(job_artifacts.c.job_id == job_id))
                    connection.execute(insert(job_artifacts).values(job_id=job_id, **artifacts))
            return changed

        large = artifacts is not None or sum(len(piece.data) for piece in output) > LARGE
        return await self._grouped.write(job_id, run, large=large)

    @staticmethod
    def _change(
        connection: Connection, job_id: str, decide: Decide, known: JobRecord | None
    ) -> tuple[JobRecord | None, Sequence[EventDraft]]:
        if known is not None:
            step = decide(known, clock_of(connection))
            if step is not None and _replace(connection, known, step.record):
                return step.record, step.events
        query = select(jobs, _CLOCK).where(jobs.c.id == job_id).with_for_update()
        found = connection.execute(query).mappings().one_or_none()
        if found is None or (known is not None and found["fence"] != known.fence):
            return None, ()
        values = dict(found)
        now = values.pop("clock")
        step = decide(_record(values), now)  # type: ignore[arg-type]
        if step is None:
            return None, ()
        _update(connection, [step.record])
        return step.record, step.events

    async def get(self, job_id: str) -> JobRecord | None:
        """Return the job with this id."""
        return await self._database.first(select(jobs).where(jobs.c.id == job_id), _record)

    async def page(
        self,
        *,
        limit: int,
        cursor: str | None = None,
        states: Iterable[JobState] | None = None,
        context_id: str | None = None,
        namespace: str | None = None,
        contexts: Collection[str] | None = None,
    ) -> tuple[list[JobRecord], str | None]:
        """Return at most `limit` jobs after `cursor`, newest first, and the cursor of the next page."""
        query = select(jobs)
        if states is not None:
            query = query.where(jobs.c.state.in_([state.value for state in states]))
        if context_id is not None:
            query = query.where(jobs.c.context_id == context_id)
        if namespace is not None:
            query = query.where(jobs.c.namespace == namespace)
        if contexts is not None:
            query = query.where(jobs.c.context_id.in_(contexts))
        return await read_page(self._database, jobs, query, _record, limit, cursor)

    # the queue

    async def claim(
        self,
        owner: str,
        server: str,
        free: int,
        share: Share,
        decide: Callable[[JobRecord, float], JobStep],
        *,
        recent_s: float | None,
    ) -> list[JobRecord]:
        """Let jobs of the queue start: at most `free`, those that `share` chooses. `recent_s`: starts are counted."""

        def run(connection: Connection) -> tuple[list[JobRecord], Sequence[EventDraft]]:
            now = clock_of(connection)
            queues = self._queues(connection, owner, server, now, free, recent_s)
            steps = [decide(record, now) for record in share(queues)[:free]]
            if steps:
                _update(connection, [step.record for step in steps])
            return [step.record for step in steps], [event for step in steps for event in step.events]

        return await self._grouped.write("~", run)

    def _queues(
        self, connection: Connection, owner: str, server: str, now: float, free: int, recent_s: float | None
    ) -> dict[str, Queue]:
        queued = and_(jobs.c.state == JobState.QUEUED.value, jobs.c.not_before <= now)
        names = list(
            connection.execute(
                select(jobs.c.namespace)
                .where(jobs.c.state == JobState.QUEUED.value)
                .distinct()
                .order_by(jobs.c.namespace)
            ).scalars()
        )
        if len(names) > MOST_NAMESPACES:
            self._turn = (self._turn + MOST_NAMESPACES) % len(names)
            names = (names[self._turn :] + names[: self._turn])[:MOST_NAMESPACES]
        if not names:
            return {}
        running = self._counts(connection, jobs.c.state == JobState.RUNNING.value)
        recent = {} if recent_s is None else self._counts(connection, jobs.c.claimed_at > now - recent_s)
        found = {}
        for name in names:
            query = select(jobs).where(queued, jobs.c.namespace == name)
            if self.shared:
                query = query.where(not_(_elsewhere(owner, server, now)))
            query = query.order_by(jobs.c.priority.desc(), jobs.c.queued_at, jobs.c.id).limit(free)
            rows = connection.execute(query.with_for_update(skip_locked=True)).mappings()
            found[name] = Queue([_record(row) for row in rows], running.get(name, 0), recent.get(name, 0))
        return found

    @staticmethod
    def _counts(connection: Connection, condition: ColumnElement[bool]) -> dict[str, int]:
        query = select(jobs.c.namespace, func.count()).where(condition).group_by(jobs.c.namespace)
        return {name: int(count) for name, count in connection.execute(query)}

    async def queued(self, namespace: str) -> int:
        """Count the jobs of a namespace that wait to start."""
        query = select(func.count()).where(jobs.c.namespace == namespace, jobs.c.state == JobState.QUEUED.value)
        return int((await self._database.scalars(query))[0])

    async def counts(self) -> dict[JobState, int]:
        """Count the jobs in each state."""
        rows = await self._database.rows(select(jobs.c.state, func.count()).group_by(jobs.c.state))
        return {JobState(state): int(count) for state, count in rows}

    async def next_start(self) -> float | None:
        """Return the seconds until the next job of the queue may start; None if the queue is empty."""
        query = select(func.min(jobs.c.not_before) - database_clock()).where(jobs.c.state == JobState.QUEUED.value)
        found = (await self._database.scalars(query))[0]
        return None if found is None else float(found)

    # leases

    async def renew(self, owner: str, seconds: float) -> dict[str, HeldJob]:
        """Extend the lease of every running job of a server, and return these jobs."""
        mine = and_(jobs.c.owner == owner, jobs.c.state == JobState.RUNNING.value)
        statement = update(jobs).where(mine).values(lease_until=database_clock() + seconds)

        def run(connection: Connection) -> tuple[dict[str, HeldJob], Sequence[EventDraft]]:
            rows = connection.execute(statement.returning(jobs.c.id, jobs.c.fence, jobs.c.cancel))
            return {row.id: HeldJob(int(row.fence), bool(row.cancel)) for row in rows}, ()

        return await self._grouped.write("~", run)

    async def cancelled(self, owner: str) -> list[str]:
        """Return the running jobs of a server that somebody has cancelled."""
        mine = and_(jobs.c.owner == owner, jobs.c.state == JobState.RUNNING.value)
        return await self._database.scalars(select(jobs.c.id).where(mine, jobs.c.cancel.is_(True)))

    async def running(self) -> list[JobRecord]:
        """Return the jobs that run anywhere."""
        query = select(jobs).where(jobs.c.state == JobState.RUNNING.value)
        return await self._database.all(query.order_by(jobs.c.id), _record)

    async def abandoned(self, grace_s: float, but_of: Collection[str]) -> list[str]:
        """Return the running jobs whose lease ended at least `grace_s` seconds ago, but for those of some owners."""
        ended = and_(jobs.c.state == JobState.RUNNING.value, jobs.c.lease_until < database_clock() - grace_s)
        return await self._ids(select(jobs.c.id).where(ended, jobs.c.owner.not_in(but_of)))

    async def overdue(self) -> list[str]:
        """Return the jobs that wait, and whose time is over."""
        waits = jobs.c.state.in_([JobState.QUEUED.value, JobState.WAITING_APPROVAL.value])
        return await self._ids(select(jobs.c.id).where(waits, jobs.c.due_at <= database_clock()))

    async def decided(self) -> list[str]:
        """Return the jobs that wait for an approval about which was decided, or which is gone."""
        pending = exists().where(
            approvals.c.id == jobs.c.approval,
            approvals.c.state == ApprovalState.PENDING.value,
            approvals.c.expires_at > database_clock(),
        )
        waits = jobs.c.state == JobState.WAITING_APPROVAL.value
        return await self._ids(select(jobs.c.id).where(waits, not_(pending)))

    async def _ids(self, query: Select[Any]) -> list[str]:
        return await self._database.scalars(query.limit(_MOST))

    # the end

    async def untold(self) -> list[JobRecord]:
        """Return the ended jobs whose webhook is due."""
        return await self._database.all(select(jobs).where(jobs.c.webhook <= database_clock()).limit(_MOST), _record)

    async def expired(self) -> list[JobRecord]:
        """Return the ended jobs whose time to live is over."""
        return await self._database.all(select(jobs).where(jobs.c.expires_at <= database_clock()).limit(_MOST), _record)

    async def remove(self, job_id: str, events: Sequence[EventDraft]) -> None:
        """Remove an ended job, with its output and artifacts."""

        def run(connection: Connection) -> tuple[None, Sequence[EventDraft]]:
            gone = connection.execute(delete(jobs).where(jobs.c.id == job_id, jobs.c.expires_at.is_not(None))).rowcount
            if not gone:
                return None, ()
            for table in (job_output, job_artifacts):
                connection.execute(delete(table).where(table.c.job_id == job_id))
            return None, events

        await self._grouped.write(job_id, run)

    async def forget(self, context_id: str) -> None:
        """Remove the jobs of a context, with their output and artifacts."""

        def run(connection: Connection) -> tuple[None, Sequence[EventDraft]]:
            mine = select(jobs.c.id).where(jobs.c.context_id == context_id)
            for table in (job_output, job_artifacts):
                connection.execute(delete(table).where(table.c.job_id.in_(mine)))
            connection.execute(delete(jobs).where(jobs.c.context_id == context_id))
            return None, ()

        await self._grouped.write("~", run, large=True)

    async def of_context(self, context_id: str) -> list[JobRecord]:
        """Return the jobs of a context."""
        return await self._database.all(select(jobs).where(jobs.c.context_id == context_id), _record)

    # output and artifacts

    async def output(self, job_id: str, attempt: int, offset: int) -> list[OutputPiece]:
        """Return the output of an attempt from an offset on, about a megabyte; the first piece may begin before."""
        columns = (job_output.c.start, job_output.c.stream, job_output.c.data, job_output.c.raw)
        of_attempt = and_(job_output.c.job_id == job_id, job_output.c.attempt == attempt)
        ends = job_output.c.start + func.length(job_output.c.data)
        query = select(*columns).where(of_attempt, ends > offset).order_by(job_output.c.start).limit(16)
        found, size = [], 0
        for row in await self._database.rows(query):
            found.append(OutputPiece(int(row[0]), row[1], bytes(row[2]), int(row[3])))
            size += len(found[-1].data)
            if size >= PAGE_BYTES:
                break
        return found

    async def artifacts(self, job_id: str) -> tuple[list[dict[str, Any]], bool]:
        """Return the files that a job produced, and whether there were more."""
        query = select(job_artifacts.c.files, job_artifacts.c.truncated).where(job_artifacts.c.job_id == job_id)
        rows = await self._database.rows(query)
        return (list(rows[0][0]), bool(rows[0][1])) if rows else ([], False)


def _write_output(connection: Connection, job_id: str, attempt: int, output: Sequence[OutputPiece]) -> None:
    if output:
        rows = [{"job_id": job_id, "attempt": attempt, **each._asdict()} for each in output]
        connection.execute(insert(job_output), rows)


_UPDATE = update(jobs).where(jobs.c.id == bindparam("key"))


_REPLACE = update(jobs).where(
    jobs.c.id == bindparam("key"),
    jobs.c.state == bindparam("seen_state"),
    jobs.c.fence == bindparam("seen_fence"),
    jobs.c.cancel == bindparam("seen_cancel"),
)
_WAITING = select(1).where(jobs.c.state == JobState.QUEUED.value, jobs.c.not_before <= bindparam("now")).limit(1)


def _update(connection: Connection, records: Sequence[JobRecord]) -> None:
    rows = []
    for record in records:
        changed = {name: value for name, value in _row(record).items() if name not in _CONSTANT}
        rows.append({"key": record.id, **changed})
    connection.execute(_UPDATE, rows)


def _replace(connection: Connection, known: JobRecord, record: JobRecord) -> bool:
    """Write what has changed of a job that is as its server knows it; False if somebody else has changed it."""
    before, after = _row(known), _row(record)
    changed = {name: value for name, value in after.items() if value != before[name]}
    seen = {"key": known.id, "seen_state": before["state"], "seen_fence": known.fence, "seen_cancel": known.cancel}
    return not changed or connection.execute(_REPLACE, {**seen, **changed}).rowcount == 1


def _elsewhere(owner: str, server: str, now: float) -> ColumnElement[bool]:
    """Whether another process that answers has the sandbox of a job's context, or another server its files."""
    leased = and_(sessions.c.lease_owner.is_not(None), sessions.c.lease_owner != owner, sessions.c.lease_until > now)
    of_server = or_(nodes.c.name == sessions.c.node, nodes.c.name.startswith(sessions.c.node + ":"))
    alive = exists().where(of_server, nodes.c.seen_at > now - nodes.c.lease_s)
    has_files = and_(sessions.c.node.is_not(None), sessions.c.node != server, alive)
    ended = sessions.c.state == State.TERMINATED.value
    return exists().where(sessions.c.context_id == jobs.c.context_id, not_(ended), or_(leased, has_files))
