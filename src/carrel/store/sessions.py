"""The queries on sessions. Holds no rule of the life of a session: it stores what it is told."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime

from sqlalchemy import Double, and_, bindparam, case, func, insert, or_, select, update
from sqlalchemy.engine import RowMapping
from sqlalchemy.exc import IntegrityError

from carrel.errors import Conflict, InvalidRequest
from carrel.models import Limits, Network, SandboxInfo, State, Trust
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
        )


_NAMES = tuple(each.name for each in fields(SessionRecord))


def _plain(name: str, value: object) -> object:
    if isinstance(value, Limits):
        return value.model_dump(exclude_none=True)
    if name in {"env", "labels"} and isinstance(value, Mapping):
        return dict(value)
    return str(value) if isinstance(value, State | Trust | Network) else value


def _record(row: RowMapping) -> SessionRecord:
    return SessionRecord(
        id=row["id"],
        context_id=row["context_id"],
        ephemeral=row["ephemeral"],
        state=State(row["state"]),
        provider=row["provider"],
        isolation_level=row["isolation_level"],
        unsafe=row["unsafe"],
        trust=Trust(row["trust"]),
        network=Network(row["network"]),
        limits=Limits.model_validate(row["limits"]),
        created_at=row["created_at"],
        last_activity_at=row["last_activity_at"],
        env=row["env"],
        labels=row["labels"],
        handle=row["handle"],
        idempotency_key=row["idempotency_key"],
        error=row["error"],
        end_reason=row["end_reason"],
    )


def encode_cursor(record: SessionRecord) -> str:
    """The opaque text that stands for the place after `record` in a list."""
    return base64.urlsafe_b64encode(json.dumps([record.created_at, record.id]).encode()).decode().rstrip("=")


def decode_cursor(text: str) -> tuple[float, str]:
    """The place a cursor stands for; `InvalidRequest` when it is not one of ours."""
    try:
        value = json.loads(base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True))
        created, name = value
        if type(created) not in {float, int} or type(name) is not str:
            raise ValueError
        return float(created), name
    except (ValueError, TypeError, binascii.Error, RecursionError, OverflowError):
        raise InvalidRequest(
            "the cursor is not one this server gave", field="cursor", hint="take `next` of the page before"
        ) from None


class SessionStore:
    """Reads and writes session records."""

    def __init__(self, database: Database):
        self._engine = database.engine

    async def insert(self, record: SessionRecord) -> None:
        """Add a record; `Conflict` when its context or idempotency key is taken."""
        values = {name: _plain(name, getattr(record, name)) for name in _NAMES}
        try:
            async with self._engine.begin() as connection:
                await connection.execute(insert(sessions).values(**values))
        except IntegrityError:
            raise Conflict(
                "a session of this context or idempotency key exists already",
                field="context_id",
                hint="ask again: the existing one is then returned",
            ) from None

    async def update(self, session_id: str, **values: object) -> None:
        """Change some fields of one record, in one transaction."""
        plain = {name: _plain(name, value) for name, value in values.items()}
        async with self._engine.begin() as connection:
            await connection.execute(update(sessions).where(sessions.c.id == session_id).values(**plain))

    async def touch(self, activity: Mapping[str, float]) -> None:
        """Write the last activity of many sessions; never moves a clock back."""
        if not activity:
            return
        when = bindparam("seen", type_=Double)
        later = case((sessions.c.last_activity_at > when, sessions.c.last_activity_at), else_=when)
        statement = update(sessions).where(sessions.c.id == bindparam("key")).values(last_activity_at=later)
        rows = [{"key": key, "seen": value} for key, value in activity.items()]
        async with self._engine.begin() as connection:
            await connection.execute(statement, rows)

    async def get(self, session_id: str) -> SessionRecord | None:
        """The record with that id."""
        return await self._one(sessions.c.id == session_id)

    async def of_context(self, context_id: str) -> SessionRecord | None:
        """The record of a context that is not terminated."""
        return await self._one(and_(sessions.c.context_id == context_id, sessions.c.state != State.TERMINATED.value))

    async def of_key(self, idempotency_key: str) -> SessionRecord | None:
        """The record a creation with that idempotency key made."""
        return await self._one(sessions.c.idempotency_key == idempotency_key)

    async def in_states(self, states: Iterable[State]) -> list[SessionRecord]:
        """Every record in one of these states."""
        query = select(sessions).where(sessions.c.state.in_([state.value for state in states]))
        async with self._engine.connect() as connection:
            return [_record(row) for row in (await connection.execute(query)).mappings()]

    async def count(self, states: Iterable[State]) -> int:
        """How many records are in these states."""
        query = select(func.count()).select_from(sessions)
        query = query.where(sessions.c.state.in_([state.value for state in states]))
        async with self._engine.connect() as connection:
            return int((await connection.execute(query)).scalar_one())

    async def page(
        self,
        *,
        limit: int,
        cursor: str | None = None,
        states: Iterable[State] | None = None,
        context_id: str | None = None,
    ) -> tuple[list[SessionRecord], str | None]:
        """Newest first: at most `limit` records after `cursor`, and the cursor of the next page."""
        query = select(sessions).order_by(sessions.c.created_at.desc(), sessions.c.id.desc()).limit(limit + 1)
        if cursor is not None:
            created, name = decode_cursor(cursor)
            same = and_(sessions.c.created_at == created, sessions.c.id < name)
            query = query.where(or_(sessions.c.created_at < created, same))
        if states is not None:
            query = query.where(sessions.c.state.in_([state.value for state in states]))
        if context_id is not None:
            query = query.where(sessions.c.context_id == context_id)
        async with self._engine.connect() as connection:
            records = [_record(row) for row in (await connection.execute(query)).mappings()]
        more = len(records) > limit
        return records[:limit], encode_cursor(records[limit - 1]) if more else None

    async def _one(self, condition: object) -> SessionRecord | None:
        query = select(sessions).where(condition)  # type: ignore[arg-type]
        async with self._engine.connect() as connection:
            row = (await connection.execute(query)).mappings().first()
        return None if row is None else _record(row)
