"""The queries on approvals. Every change is one statement that only one caller can win; decides nothing itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from sqlalchemy import ColumnElement, Select, and_, delete, func, insert, or_, select, update
from sqlalchemy.engine import RowMapping

from carrel.models import ApprovalInfo, ApprovalScope, ApprovalState
from carrel.store.cursors import read_page
from carrel.store.database import Database
from carrel.store.tables import approvals

_INNER = frozenset({"digest", "run", "run_on", "run_in"})


@dataclass(frozen=True, slots=True)
class ApprovalRecord:
    """One row. `digest` names the operation exactly as it was asked for; `run` names its dispatch while that lasts."""

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
        """The context it is for, or the sandbox that has none."""
        return self.context_id or self.sandbox_id or None

    def info(self) -> ApprovalInfo:
        """The record as the API shows it."""
        values = {name: value for name, value in asdict(self).items() if name not in _INNER}
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
        statement = insert(approvals).values(**values)
        await self._database.execute(statement)

    async def get(self, approval_id: str) -> ApprovalRecord | None:
        """The approval with that id."""
        found = await self._all(select(approvals).where(approvals.c.id == approval_id))
        return found[0] if found else None

    async def pending(
        self, context_id: str | None, digest: str, now: float, requested_by: str | None = None
    ) -> ApprovalRecord | None:
        """The approval of the same operation in the same context, for the same asker if one is named, that still
        waits.
        """
        query = select(approvals).where(
            _same(context_id, digest, requested_by), approvals.c.state == ApprovalState.PENDING.value
        )
        found = await self._all(query.where(approvals.c.expires_at > now).limit(1))
        return found[0] if found else None

    async def waiting(self, context_id: str | None, requested_by: str, now: float) -> int:
        """How many approvals of a context still wait; without one, how many of who asked."""
        mine = approvals.c.context_id == context_id
        if context_id is None:
            mine = and_(approvals.c.context_id.is_(None), approvals.c.requested_by == requested_by)
        query = select(func.count()).select_from(approvals).where(mine, approvals.c.expires_at > now)
        query = query.where(approvals.c.state == ApprovalState.PENDING.value)
        return await self._database.read(lambda connection: int(connection.execute(query).scalar_one()))

    async def granted(self, context_id: str, digest: str) -> ApprovalRecord | None:
        """An approval of the same operation for the whole context."""
        query = select(approvals).where(_same(context_id, digest), approvals.c.state == ApprovalState.APPROVED.value)
        found = await self._all(query.where(approvals.c.scope == ApprovalScope.CONTEXT.value).limit(1))
        return found[0] if found else None

    async def ready(
        self, context_id: str | None, digest: str, decided_after: float, requested_by: str | None = None
    ) -> ApprovalRecord | None:
        """An approval of the same operation, for the same asker if one is named, that was given and not used yet."""
        query = select(approvals).where(
            _same(context_id, digest, requested_by), approvals.c.state == ApprovalState.APPROVED.value
        )
        query = query.where(approvals.c.used_at.is_(None), approvals.c.decided_at > decided_after)
        found = await self._all(query.order_by(approvals.c.decided_at).limit(1))
        return found[0] if found else None

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
        """Decide what still waits; False when it was decided before, has expired or is not there."""
        statement = (
            update(approvals)
            .where(approvals.c.id == approval_id, approvals.c.state == ApprovalState.PENDING.value)
            .where(approvals.c.expires_at > at)
            .values(
                state=state.value,
                scope=scope and scope.value,
                rule=rule,
                decided_by=by,
                decided_at=at,
                message=message,
            )
        )
        return await self._database.execute(statement) == 1

    async def use(
        self, approval_id: str, at: float, *, run: str | None = None, node: str = "", place: str = ""
    ) -> bool:
        """Take an approval to run its operation; only the first one who asks gets it. With a `run` it is known by that
        name, as this server's and in that sandbox, until it has ended.
        """
        statement = (
            update(approvals)
            .where(approvals.c.id == approval_id, approvals.c.state == ApprovalState.APPROVED.value)
            .where(approvals.c.used_at.is_(None))
            .values(used_at=at, run=run, run_on=node or None, run_in=place or None)
        )
        return await self._database.execute(statement) == 1

    async def ended(self, approval_id: str, run: str, *, used: bool) -> bool:
        """A run is over, or it never was: then the approval can be used again. False when it was over before."""
        values: dict[str, object] = {"run": None} if used else {"run": None, "used_at": None}
        statement = update(approvals).where(approvals.c.id == approval_id, approvals.c.run == run)
        return await self._database.execute(statement.values(**values)) == 1

    async def runs(self, node: str) -> list[ApprovalRecord]:
        """What a server took to run and has not said the end of, oldest first."""
        query = select(approvals).where(approvals.c.run_on == node, approvals.c.run.is_not(None))
        return await self._all(query.order_by(approvals.c.used_at, approvals.c.id))

    async def prune(self, before: float) -> int:
        """Remove what was settled before that; says how many. What waits, and what holds for a context, stays."""
        lasting = and_(
            approvals.c.state == ApprovalState.APPROVED.value, approvals.c.scope == ApprovalScope.CONTEXT.value
        )
        settled = func.coalesce(approvals.c.used_at, approvals.c.decided_at, approvals.c.expires_at)
        statement = delete(approvals).where(settled < before, approvals.c.expires_at < before)
        return await self._database.execute(statement.where(approvals.c.state != ApprovalState.PENDING.value, ~lasting))

    async def expire(self, now: float) -> int:
        """Mark what waited too long; says how many."""
        statement = update(approvals).where(approvals.c.state == ApprovalState.PENDING.value)
        return await self._database.execute(
            statement.where(approvals.c.expires_at <= now).values(state=ApprovalState.EXPIRED.value)
        )

    async def forget(self, context_id: str) -> int:
        """Let what a context waits for, or was given and has not used up, expire; says how many."""
        waiting = approvals.c.state == ApprovalState.PENDING.value
        unused = and_(approvals.c.state == ApprovalState.APPROVED.value, approvals.c.used_at.is_(None))
        statement = update(approvals).where(approvals.c.context_id == context_id, or_(waiting, unused))
        return await self._database.execute(statement.values(state=ApprovalState.EXPIRED.value))

    async def page(
        self,
        *,
        limit: int,
        cursor: str | None = None,
        states: Iterable[ApprovalState] | None = None,
        context_id: str | None = None,
    ) -> tuple[list[ApprovalRecord], str | None]:
        """Newest first: at most `limit` approvals after `cursor`, and the cursor of the next page."""
        query = select(approvals)
        if states is not None:
            query = query.where(approvals.c.state.in_([state.value for state in states]))
        if context_id is not None:
            query = query.where(approvals.c.context_id == context_id)
        return await read_page(self._database, approvals, query, _record, limit, cursor)

    async def _all(self, query: Select[tuple[object, ...]]) -> list[ApprovalRecord]:
        return await self._database.all(query, _record)


def _same(context_id: str | None, digest: str, requested_by: str | None = None) -> ColumnElement[bool]:
    owner = approvals.c.context_id.is_(None) if context_id is None else approvals.c.context_id == context_id
    same = and_(owner, approvals.c.digest == digest)
    return same if requested_by is None else and_(same, approvals.c.requested_by == requested_by)
