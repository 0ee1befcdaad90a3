"""The queries on sessions. Holds no rule of the life of a session: it stores what it is told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from types import MappingProxyType

from sqlalchemy import ColumnElement, Double, Select, and_, bindparam, case, func, insert, select, update
from sqlalchemy.engine import Connection, RowMapping
from sqlalchemy.exc import IntegrityError

from carrel.errors import AlreadyExists, Conflict
from carrel.models import Limits, Network, SandboxInfo, State, Trust
from carrel.store.clock import database_clock
from carrel.store.cursors import read_page
from carrel.store.database import Database
from carrel.store.tables import sessions

Handle = dict[str, str | int | float | bool | None]


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """One row: what is known of a session."""

    id: str
    context_id: str | None
    ephemeral: bool
    state: State
    provider: str
    isolation_level: int
    unsafe: bool
    trust: Trust
    network: Network
    limits: Limits
    created_at: float
    last_activity_at: float
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    handle: Handle | None = None
    idempotency_key: str | None = None
    error: str | None = None
    end_reason: str | None = None
    node: str | None = None
    lease_owner: str | None = None
    lease_until: float | None = None
    fence: int = 0
    filespace: bool = False
    snapshot: str | None = None
    notice: str | None = None
    template: str | None = None
    acts_for: str | None = None
    """For a sandbox of carrel's own: the context whose policy holds for it, empty for that of none."""
    agent: str | None = None
    """Whom the workspace belongs to: the agent or service whose token made it, else the template it was made by."""
    used_bytes: int | None = None
    """What the workspace held when it was last measured."""
    expires_at: float | None = None
    """When the workspace is deleted unless it is used before; None while that is not near."""
    forgotten: bool = False
    """Whether the context was deleted after this session: nothing of it counts for the next one."""

    @property
    def owner(self) -> str:
        """The context the session belongs to; the sandbox itself when it has none."""
        return self.context_id or self.id

    def info(self, last_activity_at: float | None = None) -> SandboxInfo:
        """The record as the API shows it."""
        return SandboxInfo(
            id=self.id,
            context_id=self.context_id,
            ephemeral=self.ephemeral,
            state=self.state,
            provider=self.provider,
            isolation_level=self.isolation_level,
            unsafe=self.unsafe,
            trust=self.trust,
            network=self.network,
            limits=self.limits,
            labels=dict(self.labels),
            created_at=datetime.fromtimestamp(self.created_at, UTC),
            last_activity_at=datetime.fromtimestamp(max(last_activity_at or 0, self.last_activity_at), UTC),
            error=self.error,
            node=self.node,
            filespace=self.filespace,
            snapshot=self.snapshot,
            notice=self._notice(),
            template=self.template,
            agent=self.agent,
            expires_at=None if self.expires_at is None else datetime.fromtimestamp(self.expires_at, UTC),
        )

    def _notice(self) -> str | None:
        if self.expires_at is None:
            return self.notice
        when = datetime.fromtimestamp(self.expires_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
        warning = f"the files are deleted on {when} unless the sandbox is used before; snapshots you take stay"
        return warning if self.notice is None else f"{warning}; {self.notice}"


_NAMES = tuple(each.name for each in fields(SessionRecord))
_LEASE = frozenset({"lease_owner", "lease_until", "fence"})


def _plain(name: str, value: object) -> object:
    if isinstance(value, Limits):
        return value.model_dump(exclude_none=True)
    if name in {"env", "labels"} and isinstance(value, Mapping):
        return dict(value)
    return str(value) if isinstance(value, State | Trust | Network) else value


def _record(row: RowMapping) -> SessionRecord:
    read = {
        "state": State(row["state"]),
        "trust": Trust(row["trust"]),
        "network": Network(row["network"]),
        "limits": Limits.model_validate(row["limits"]),
    }
    return SessionRecord(**{**row, **read})


class SessionStore:
    """Reads and writes session records. What a lease consists of is written by `LeaseStore` alone."""

    def __init__(self, database: Database):
        self._database = database

    async def insert(self, record: SessionRecord, lease: tuple[str, float] | None = None) -> None:
        """Add a record; `AlreadyExists` when its context or idempotency key is taken.

        `lease` is the owner and the seconds of a lease that begins at once, with fence 1; else nobody has one.
        """
        values = {name: _plain(name, getattr(record, name)) for name in _NAMES if name not in _LEASE}
        if lease is not None:
            owner, seconds = lease
            values |= {"lease_owner": owner, "lease_until": database_clock() + seconds, "fence": 1}
        statement = insert(sessions).values(**values)
        try:
            await self._database.execute(statement)
        except IntegrityError:
            raise AlreadyExists(
                "a session of this context or idempotency key exists already",
                field="context_id",
                hint="ask again: the existing one is then returned",
            ) from None

    async def update(
        self,
        session_id: str,
        more: Mapping[str, object] = MappingProxyType({}),
        *,
        fence: int | None = None,
        release: bool = False,
        **values: object,
    ) -> None:
        """Change some fields of one record, in one transaction.

        With `fence`, only while the lease that gave it has not been released or taken by another: else nothing is
        changed and `Conflict` is raised. With `release` the lease is given back in the same step.
        """
        values |= more
        if refused := _LEASE & values.keys():
            raise TypeError(f"only a lease changes {', '.join(sorted(refused))}")
        plain = {name: _plain(name, value) for name, value in values.items()}
        if release:
            plain |= {"lease_owner": None, "lease_until": None}
        statement = update(sessions).where(sessions.c.id == session_id).values(**plain)
        if fence is not None:
            statement = statement.where(sessions.c.fence == fence, sessions.c.lease_owner.is_not(None))
        changed = await self._database.execute(statement)
        if fence is not None and changed == 0:
            raise Conflict(
                f"the lease on session {session_id} is lost: fence {fence} is no longer the newest",
                field="fence",
                hint="another control plane owns the session now; leave it alone",
            )

    async def touch(self, activity: Mapping[str, float]) -> None:
        """Write the last activity of many sessions; never moves a clock back."""
        if not activity:
            return
        when = bindparam("seen", type_=Double)
        later = case((sessions.c.last_activity_at > when, sessions.c.last_activity_at), else_=when)
        statement = update(sessions).where(sessions.c.id == bindparam("key")).values(last_activity_at=later)
        # Always in the same order, or two control planes could wait for each other's rows.
        rows = [{"key": key, "seen": value} for key, value in sorted(activity.items())]
        await self._database.write(lambda connection: connection.execute(statement, rows).close())

    async def get(self, session_id: str) -> SessionRecord | None:
        """The record with that id."""
        return await self._one(sessions.c.id == session_id)

    async def of_context(self, context_id: str) -> SessionRecord | None:
        """The record of a context that is not terminated."""
        return await self._one(and_(sessions.c.context_id == context_id, sessions.c.state != State.TERMINATED.value))

    async def newest_of_context(self, context_id: str) -> SessionRecord | None:
        """The record of a context that was made last, terminated or not."""
        query = select(sessions).where(sessions.c.context_id == context_id)
        found = await self._all(query.order_by(sessions.c.created_at.desc(), sessions.c.id.desc()).limit(1))
        return found[0] if found else None

    async def forget(self, context_id: str) -> None:
        """Let nothing of the ended sessions of a context count for the next one."""
        ended = and_(sessions.c.context_id == context_id, sessions.c.state == State.TERMINATED.value)
        statement = update(sessions).where(ended).values(forgotten=True, template=None, expires_at=None)
        await self._database.execute(statement)

    async def of_key(self, idempotency_key: str) -> SessionRecord | None:
        """The record a creation with that idempotency key made."""
        return await self._one(sessions.c.idempotency_key == idempotency_key)

    async def in_states(self, states: Iterable[State]) -> list[SessionRecord]:
        """Every record in one of these states."""
        return await self._all(select(sessions).where(sessions.c.state.in_([state.value for state in states])))

    async def counts(self) -> dict[State, int]:
        """How many records are in each state that is not terminated."""
        query = select(sessions.c.state, func.count()).where(sessions.c.state != State.TERMINATED.value)
        query = query.group_by(sessions.c.state)

        def run(connection: Connection) -> dict[State, int]:
            return {State(state): int(number) for state, number in connection.execute(query)}

        return await self._database.read(run)

    async def page(
        self,
        *,
        limit: int,
        cursor: str | None = None,
        states: Iterable[State] | None = None,
        context_id: str | None = None,
    ) -> tuple[list[SessionRecord], str | None]:
        """Newest first: at most `limit` records after `cursor`, and the cursor of the next page."""
        query = select(sessions)
        if states is not None:
            query = query.where(sessions.c.state.in_([state.value for state in states]))
        if context_id is not None:
            query = query.where(sessions.c.context_id == context_id)
        return await read_page(self._database, sessions, query, _record, limit, cursor)

    async def _one(self, condition: ColumnElement[bool]) -> SessionRecord | None:
        found = await self._all(select(sessions).where(condition).limit(1))
        return found[0] if found else None

    async def _all(self, query: Select[tuple[object, ...]]) -> list[SessionRecord]:
        return await self._database.all(query, _record)
