"""The queries on approvals. Each change is one conditional statement, so of two callers only one succeeds."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from sqlalchemy import ColumnElement, Update, and_, delete, func, insert, or_, select, update
from sqlalchemy.engine import Connection, RowMapping

from carrel.models import ApprovalInfo, ApprovalScope, ApprovalState
from carrel.models.events import EventDraft, EventKind, body_of
from carrel.store.cursors import read_page
from carrel.store.database import Database
from carrel.store.events import stage
from carrel.store.tables import approvals

_MOST_EXPIRED = 500
_INTERNAL = frozenset({"digest", "run", "run_on", "run_in"})
_PENDING = approvals.c.state == ApprovalState.PENDING.value
_APPROVED = approvals.c.state == ApprovalState.APPROVED.value
_UNUSED = and_(_APPROVED, approvals.c.used_at.is_(None))
_FOR_CONTEXT = and_(_APPROVED, approvals.c.scope == ApprovalScope.CONTEXT.value)


@dataclass(frozen=True, slots=True)
class ApprovalRecord:
    """A row of the table of approvals. `digest` identifies the exact operation; `run` is set while it runs."""

    id: str
    context_id: str | None
    sandbox_id: str
    kind: str
    operation: str
    summary: str
    arguments: Mapping[str, object]
    digest: str
    reason: str
    requested_by: str
    created_at: float
    expires_at: float
    state: ApprovalState = ApprovalState.PENDING
    scope: ApprovalScope | None = None
    rule: str | None = None
    decided_by: str | None = None
    decided_at: float | None = None
    message: str | None = None
    used_at: float | None = None
    run: str | None = None
    run_on: str | None = None
    run_in: str | None = None

    @property
    def owner(self) -> str | None:
        """The context, or the sandbox when it has no context."""
        return self.context_id or self.sandbox_id or None

    def info(self) -> ApprovalInfo:
        """Return the record as the API shows it."""
        values = {name: value for name, value in asdict(self).items() if name not in _INTERNAL}
        for name in ("created_at", "expires_at", "decided_at", "used_at"):
            if values[name] is not None:
                values[name] = datetime.fromtimestamp(values[name], UTC)
        return ApprovalInfo.model_validate(values)


def _record(row: RowMapping) -> ApprovalRecord:
    scope = None if row["scope"] is None else ApprovalScope(row["scope"])
    return ApprovalRecord(**{**row, "state": ApprovalState(row["state"]), "scope": scope})


class ApprovalStore:
    """Reads and writes approvals."""

    def __init__(self, database: Database):
        self._database = database

    async def insert(self, record: ApprovalRecord) -> None:
        """Add an approval."""
        values = {**asdict(record), "state": record.state.value, "scope": record.scope and record.scope.value}

        def run(connection: Connection) -> None:
            connection.execute(insert(approvals).values(**values))
            asked = {"summary": record.summary, "reason": record.reason, "requested_by": record.requested_by}
            stage(connection, [_event(record, EventKind.APPROVAL_ASKED, asked)])

        await self._database.write(run)

    async def get(self, approval_id: str) -> ApprovalRecord | None:
        """Return the approval with this id."""
        return await self._database.first(select(approvals).where(approvals.c.id == approval_id), _record)

    async def pending(
        self, context_id: str | None, digest: str, now: float, requested_by: str | None = None
    ) -> ApprovalRecord | None:
        """Return the pending approval of the same operation and context (and of the same requester, if given)."""
        query = select(approvals).where(_same(context_id, digest, requested_by), _PENDING, approvals.c.expires_at > now)
        return await self._database.first(query, _record)

    async def waiting(self, context_id: str | None, requested_by: str, now: float) -> int:
        """Count the pending approvals of a context; without a context, those of the requester."""
        mine = approvals.c.context_id == context_id
        if context_id is None:
            mine = and_(approvals.c.context_id.is_(None), approvals.c.requested_by == requested_by)
        query = select(func.count()).select_from(approvals).where(mine, approvals.c.expires_at > now, _PENDING)
        return int((await self._database.scalars(query))[0])

    async def granted(self, context_id: str, digest: str) -> ApprovalRecord | None:
        """Return an approval of the same operation for the whole context."""
        query = select(approvals).where(_same(context_id, digest), _FOR_CONTEXT)
        return await self._database.first(query, _record)

    async def ready(
        self, context_id: str | None, digest: str, decided_after: float, requested_by: str | None = None
    ) -> ApprovalRecord | None:
        """Return an unused approval of the same operation (and for the same requester, if given)."""
        query = select(approvals).where(_same(context_id, digest, requested_by), _UNUSED)
        query = query.where(approvals.c.decided_at > decided_after)
        return await self._database.first(query.order_by(approvals.c.decided_at), _record)

    async def decide(
        self,
        approval_id: str,
        state: ApprovalState,
        *,
        by: str,
        at: float,
        scope: ApprovalScope | None = None,
        rule: str | None = None,
        message: str | None = None,
    ) -> bool:
        """Decide a pending approval; False when it was already decided, has expired or does not exist."""
        statement = (
            update(approvals)
            .where(approvals.c.id == approval_id, _PENDING, approvals.c.expires_at > at)
            .values(
                state=state.value,
                scope=scope and scope.value,
                rule=rule,
                decided_by=by,
                decided_at=at,
                message=message,
            )
        )
        decided = {"state": state.value, "decided_by": by, "scope": scope and scope.value, "message": message}
        return await self._change(statement, [approval_id], decided) == 1

    async def use(
        self, approval_id: str, at: float, *, run: str | None = None, node: str = "", place: str = ""
    ) -> bool:
        """Use an approval to run its operation; only the first caller gets True. With `run`, the record names the run,
        its server and its sandbox until `ended` is called.
        """
        statement = update(approvals).where(approvals.c.id == approval_id, _UNUSED)
        statement = statement.values(used_at=at, run=run, run_on=node or None, run_in=place or None)
        return await self._database.execute(statement) == 1

    async def ended(self, approval_id: str, run: str, *, used: bool) -> bool:
        """Record that a run has ended. If it never started (not `used`), the approval can be used again. False when the
        end was already recorded.
        """
        values: dict[str, object] = {"run": None} if used else {"run": None, "used_at": None}
        statement = update(approvals).where(approvals.c.id == approval_id, approvals.c.run == run)
        return await self._database.execute(statement.values(**values)) == 1

    async def runs(self, *nodes: str) -> list[ApprovalRecord]:
        """Return the approvals whose run on these servers has no recorded end, oldest first."""
        query = select(approvals).where(approvals.c.run_on.in_(nodes), approvals.c.run.is_not(None))
        return await self._database.all(query.order_by(approvals.c.used_at, approvals.c.id), _record)

    async def prune(self, before: float) -> int:
        """Remove approvals that were completed before that time, and return how many. Pending approvals and those for a
        whole context stay.
        """
        completed = func.coalesce(approvals.c.used_at, approvals.c.decided_at, approvals.c.expires_at)
        statement = delete(approvals).where(completed < before, approvals.c.expires_at < before)
        return await self._database.execute(statement.where(~_PENDING, ~_FOR_CONTEXT))

    async def expire(self, now: float) -> int:
        """Mark pending approvals whose time is over as expired, and return how many."""
        late = and_(_PENDING, approvals.c.expires_at <= now)
        found = await self._database.scalars(select(approvals.c.id).where(late).limit(_MOST_EXPIRED))
        if not found:
            return 0
        statement = update(approvals).where(late, approvals.c.id.in_(found)).values(state=ApprovalState.EXPIRED.value)
        return await self._change(statement, found, {"state": ApprovalState.EXPIRED.value})

    async def forget(self, context_id: str) -> int:
        """Mark the pending and the unused approvals of a context as expired, and return how many."""
        statement = update(approvals).where(approvals.c.context_id == context_id, or_(_PENDING, _UNUSED))
        return await self._database.execute(statement.values(state=ApprovalState.EXPIRED.value))

    async def _change(self, statement: Update, ids: Sequence[str], values: Mapping[str, object]) -> int:
        """Decide pending approvals, and write the events with it."""

        def run(connection: Connection) -> int:
            pending = select(approvals).where(approvals.c.id.in_(ids), _PENDING).with_for_update()
            before = [_record(row) for row in connection.execute(pending).mappings()]
            changed = connection.execute(statement).rowcount
            if changed == len(before):
                stage(connection, [_event(each, EventKind.APPROVAL_DECIDED, values) for each in before])
            return changed

        return await self._database.write(run)

    async def page(
        self,
        *,
        limit: int,
        cursor: str | None = None,
        states: Iterable[ApprovalState] | None = None,
        context_id: str | None = None,
    ) -> tuple[list[ApprovalRecord], str | None]:
        """Return at most `limit` approvals after `cursor`, newest first, and the cursor of the next page."""
        query = select(approvals)
        if states is not None:
            query = query.where(approvals.c.state.in_([state.value for state in states]))
        if context_id is not None:
            query = query.where(approvals.c.context_id == context_id)
        return await read_page(self._database, approvals, query, _record, limit, cursor)


def _event(record: ApprovalRecord, kind: EventKind, values: Mapping[str, object]) -> EventDraft:
    body = body_of({"approval": record.id, "operation": record.operation, **values})
    return EventDraft(time.time(), kind.value, record.context_id, record.sandbox_id or None, "", body)


def _same(context_id: str | None, digest: str, requested_by: str | None = None) -> ColumnElement[bool]:
    owner = approvals.c.context_id.is_(None) if context_id is None else approvals.c.context_id == context_id
    same = and_(owner, approvals.c.digest == digest)
    return same if requested_by is None else and_(same, approvals.c.requested_by == requested_by)
