"""The queries on sessions. Knows no rules of the session lifecycle."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Double, Update, and_, bindparam, case, func, insert, or_, select, update
from sqlalchemy.engine import Connection, RowMapping
from sqlalchemy.exc import IntegrityError

from carrel.errors import AlreadyExists, RunsElsewhere
from carrel.models import HostPath, Limits, Network, SandboxInfo, State, Trust
from carrel.models.events import EventDraft, EventKind, body_of
from carrel.store.clock import database_clock, moment_after
from carrel.store.cursors import read_page
from carrel.store.database import Database
from carrel.store.events import stage
from carrel.store.tables import sessions

Handle = dict[str, str | int | float | bool | None]


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A row of the table of sessions."""

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
    """For an internal sandbox of carrel: the context whose policy applies to it; empty when none does."""
    agent: str | None = None
    """The owner of the workspace: the agent or service whose token created it, else its template."""
    used_bytes: int | None = None
    """Size of the workspace when it was last measured."""
    expires_at: float | None = None
    """When the workspace is deleted unless it is used before; None while that is far away."""
    forgotten: bool = False
    """Whether the context was deleted after this session; then the next session inherits nothing from it."""
    workspace_path: str | None = None
    """The folder of the host that is the workspace; None for one of carrel's own."""
    host_paths: tuple[HostPath, ...] = ()
    """What else of the host its sandbox sees, read-only."""
    ends_at: float | None = None
    """When the running sandbox ends, whatever runs in it; None if it has no lifetime."""
    image: str | None = None
    """The image that was asked for; None for the host's own root."""
    image_digest: str | None = None
    """The image that the session runs from, for its life: the name may mean another one by now."""
    image_workdir: bool = False
    """Whether commands start in the working directory of the image."""

    @property
    def owner(self) -> str:
        """The context of the session, or the id of the sandbox when it has no context."""
        return self.context_id or self.id

    def info(self, last_activity_at: float | None = None) -> SandboxInfo:
        """Return the record as the API shows it."""
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
            image=self.image,
            image_digest=self.image_digest,
            workspace_path=self.workspace_path,
            host_paths=list(self.host_paths),
            snapshot=self.snapshot,
            notice=self._notice(),
            template=self.template,
            agent=self.agent,
            expires_at=None if self.expires_at is None else datetime.fromtimestamp(self.expires_at, UTC),
            ends_at=None if self.ends_at is None else datetime.fromtimestamp(self.ends_at, UTC),
        )

    def _notice(self) -> str | None:
        if self.expires_at is None:
            return self.notice
        when = datetime.fromtimestamp(self.expires_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
        warning = f"the files are deleted on {when} unless the sandbox is used before; snapshots you take stay"
        return warning if self.notice is None else f"{warning}; {self.notice}"


_NAMES = tuple(each.name for each in fields(SessionRecord))
_LEASE = frozenset({"lease_owner", "lease_until", "fence"})
_EVENTFUL = frozenset({"state", "notice"})


def _happened(facts: Mapping[Any, object], kind: EventKind, values: Mapping[str, object]) -> EventDraft:
    """Return an event of a session, from its columns."""
    context, node = facts["context_id"], facts["node"]
    return EventDraft(
        time.time(),
        kind.value,
        context if isinstance(context, str) else None,
        str(facts["id"]),
        node if isinstance(node, str) else "",
        body_of(values),
    )


def _plain(name: str, value: object) -> object:
    if isinstance(value, Limits):
        return value.model_dump(exclude_none=True)
    if name in {"env", "labels"} and isinstance(value, Mapping):
        return dict(value)
    if name == "host_paths" and isinstance(value, tuple):
        return [each.model_dump() for each in value] or None
    return str(value) if isinstance(value, State | Trust | Network) else value


def _record(row: RowMapping) -> SessionRecord:
    read = {
        "state": State(row["state"]),
        "trust": Trust(row["trust"]),
        "network": Network(row["network"]),
        "limits": Limits.model_validate(row["limits"]),
        "host_paths": tuple(HostPath.model_validate(each) for each in row["host_paths"] or ()),
    }
    return SessionRecord(**{**row, **read})


class ImageSession(NamedTuple):
    """A session that runs from an image. `name` is its context, or its id."""

    name: str
    context_id: str | None


class SessionStore:
    """Reads and writes session records. Only `LeaseStore` changes the columns of a lease."""

    def __init__(self, database: Database):
        self._database = database

    async def insert(self, record: SessionRecord, lease: tuple[str, float] | None = None) -> None:
        """Add a record; `AlreadyExists` when its context or idempotency key is taken.

        With `lease` (owner and seconds) the session starts with a lease of fence 1.
        """
        values = {name: _plain(name, getattr(record, name)) for name in _NAMES if name not in _LEASE}
        if lease is not None:
            owner, seconds = lease
            values |= {"lease_owner": owner, "lease_until": database_clock() + seconds, "fence": 1}
        try:
            await self._database.write(lambda connection: self._insert(connection, values, record.context_id))
        except IntegrityError:
            raise AlreadyExists(
                "a session of this context or idempotency key exists already",
                field="context_id",
                hint="ask again: the existing session is then returned",
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

        With `fence`, only while its lease was not released or acquired by another server: else nothing changes and
        `RunsElsewhere` is raised. With `release` the lease is released in the same step.
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
        if _EVENTFUL & plain.keys():
            changed = await self._database.write(
                lambda connection: self._change(connection, statement, session_id, plain)
            )
        else:
            changed = await self._database.execute(statement)
        if fence is not None and changed == 0:
            raise RunsElsewhere(
                f"the lease on session {session_id} is lost: fence {fence} is no longer the newest",
                field="fence",
                hint="another control plane owns the session now; leave it alone",
            )

    @staticmethod
    def _insert(connection: Connection, values: dict[str, Any], context_id: str | None) -> None:
        if context_id is not None:
            newest = select(func.max(sessions.c.created_at)).where(sessions.c.context_id == context_id)
            values["created_at"] = moment_after(connection, values["created_at"], newest)
        connection.execute(insert(sessions).values(**values))
        stage(connection, [_happened(values, EventKind.SESSION, {"state": values["state"]})])

    @staticmethod
    def _change(connection: Connection, statement: Update, session_id: str, plain: Mapping[str, object]) -> int:
        """Change a record, and write the events of a new state or notice with it."""
        facts = (sessions.c.id, sessions.c.context_id, sessions.c.node, sessions.c.state, sessions.c.notice)
        query = select(*facts).where(sessions.c.id == session_id).with_for_update()
        before = connection.execute(query).mappings().one_or_none()
        changed = connection.execute(statement).rowcount
        if before is None or changed == 0:
            return changed
        drafts = []
        if (state := plain.get("state", before["state"])) != before["state"]:
            why = {"error": plain.get("error"), "reason": plain.get("end_reason")}
            drafts.append(_happened(before, EventKind.SESSION, {"state": state, "before": before["state"], **why}))
        if (notice := plain.get("notice", before["notice"])) != before["notice"] and notice is not None:
            drafts.append(_happened(before, EventKind.NOTICE, {"notice": notice}))
        stage(connection, drafts)
        return changed

    async def touch(self, activity: Mapping[str, float]) -> None:
        """Write the last activity of many sessions; an earlier time never replaces a later one."""
        if not activity:
            return
        when = bindparam("seen", type_=Double)
        later = case((sessions.c.last_activity_at > when, sessions.c.last_activity_at), else_=when)
        statement = update(sessions).where(sessions.c.id == bindparam("key")).values(last_activity_at=later)
        # Always in the same order, or two control planes could deadlock on each other's rows.
        rows = [{"key": key, "seen": value} for key, value in sorted(activity.items())]
        await self._database.write(lambda connection: connection.execute(statement, rows).close())

    async def get(self, session_id: str) -> SessionRecord | None:
        """Return the record with this id."""
        return await self._one(sessions.c.id == session_id)

    async def of_context(self, context_id: str) -> SessionRecord | None:
        """Return the record of a context that is not terminated."""
        return await self._one(and_(sessions.c.context_id == context_id, sessions.c.state != State.TERMINATED.value))

    async def newest_of_context(self, context_id: str) -> SessionRecord | None:
        """Return the newest record of a context, terminated or not."""
        query = select(sessions).where(sessions.c.context_id == context_id)
        return await self._database.first(query.order_by(sessions.c.created_at.desc(), sessions.c.id.desc()), _record)

    async def forget(self, context_id: str) -> None:
        """Mark the ended sessions of a context, so that the next session inherits nothing from them."""
        ended = and_(sessions.c.context_id == context_id, sessions.c.state == State.TERMINATED.value)
        statement = update(sessions).where(ended).values(forgotten=True, template=None, expires_at=None)
        await self._database.execute(statement)

    async def of_key(self, idempotency_key: str) -> SessionRecord | None:
        """Return the record that was created with this idempotency key."""
        return await self._one(sessions.c.idempotency_key == idempotency_key)

    async def in_states(self, states: Iterable[State]) -> list[SessionRecord]:
        """Return every record in one of these states."""
        query = select(sessions).where(sessions.c.state.in_([state.value for state in states]))
        return await self._database.all(query, _record)

    async def counts(self) -> dict[State, int]:
        """Count the records in each state except terminated."""
        query = select(sessions.c.state, func.count()).where(sessions.c.state != State.TERMINATED.value)
        rows = await self._database.rows(query.group_by(sessions.c.state))
        return {State(state): int(number) for state, number in rows}

    async def image_users(self, node: str) -> dict[str, list[ImageSession]]:
        """Return the sessions of a server that run from an image and are not terminated, by its digest."""
        columns = (sessions.c.image_digest, sessions.c.context_id, sessions.c.id)
        mine = or_(sessions.c.node.is_(None), sessions.c.node == node)
        query = select(*columns).where(
            sessions.c.image_digest.is_not(None), sessions.c.state != State.TERMINATED.value, mine
        )
        found: dict[str, list[ImageSession]] = {}
        for digest, context_id, session_id in await self._database.rows(query):
            found.setdefault(digest, []).append(ImageSession(context_id or session_id, context_id))
        return found

    async def page(
        self,
        *,
        limit: int,
        cursor: str | None = None,
        states: Iterable[State] | None = None,
        context_id: str | None = None,
    ) -> tuple[list[SessionRecord], str | None]:
        """Return at most `limit` records after `cursor`, newest first, and the cursor of the next page."""
        query = select(sessions)
        if states is not None:
            query = query.where(sessions.c.state.in_([state.value for state in states]))
        if context_id is not None:
            query = query.where(sessions.c.context_id == context_id)
        return await read_page(self._database, sessions, query, _record, limit, cursor)

    async def _one(self, condition: ColumnElement[bool]) -> SessionRecord | None:
        return await self._database.first(select(sessions).where(condition), _record)
