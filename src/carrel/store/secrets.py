"""The queries on secrets. Knows sealed values only: what opens them is not here, and nothing here shows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sqlalchemy import ColumnElement, Select, and_, delete, func, insert, or_, select, update
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from carrel.errors import LimitExceeded
from carrel.store.clock import database_clock
from carrel.store.database import Database
from carrel.store.tables import secrets

ScopeKind = Literal["context", "template"]
"""What a secret belongs to."""

MOST = 256
"""Secrets a context or a template may have."""


@dataclass(frozen=True, slots=True)
class SecretInfo:
    """What may be shown of a secret. The version counts how often it was put."""

    kind: ScopeKind
    scope: str
    name: str
    version: int
    created_at: float
    updated_at: float


@dataclass(frozen=True, slots=True)
class SecretRecord(SecretInfo):
    """One row: a secret with its sealed value and the key that sealed it."""

    key_id: str
    sealed: bytes = field(repr=False)


Infos = list[SecretInfo]
Records = list[SecretRecord]

_SHOWN = tuple(secrets.c[name] for name in SecretInfo.__slots__)
_ALL = (*_SHOWN, secrets.c.key_id, secrets.c.sealed)


class SecretStore:
    """Reads and writes sealed secrets."""

    def __init__(self, database: Database, clock: Callable[[], ColumnElement[float]] = database_clock):
        self._database = database
        self._clock = clock

    async def put(self, kind: ScopeKind, scope: str, name: str, *, sealed: bytes, key_id: str) -> SecretInfo:
        """Store a secret or the next version of it; `LimitExceeded` when its scope has too many."""

        def run(connection: Connection) -> SecretInfo:
            now = float(connection.execute(select(self._clock())).scalar_one())
            return _put(connection, kind, scope, name, sealed, key_id, now)

        try:
            return await self._database.write(run)
        except IntegrityError:  # somebody stored it first, at the same moment
            return await self._database.write(run)

    async def get(self, kind: ScopeKind, scope: str, name: str) -> SecretRecord | None:
        """The secret with its sealed value."""
        found = await self._records(select(*_ALL).where(_is(kind, scope, name)))
        return found[0] if found else None

    async def list(self, kind: ScopeKind, scope: str) -> Infos:
        """What a context or a template has, by name, without any value."""
        query = select(*_SHOWN).where(secrets.c.kind == kind, secrets.c.scope == scope).order_by(secrets.c.name)

        def run(connection: Connection) -> Infos:
            return [SecretInfo(**row) for row in connection.execute(query).mappings()]

        return await self._database.read(run)

    async def of_scope(self, context: str | None, templates: Sequence[str] = ()) -> Records:
        """What a sandbox gets, by name: the secrets of its context, and of each template those that no earlier has."""
        order = [("context", context)] if context is not None else []
        order += [("template", name) for name in dict.fromkeys(templates)]
        if not order:
            return []
        wanted = or_(*(and_(secrets.c.kind == kind, secrets.c.scope == scope) for kind, scope in order))
        found = await self._records(select(*_ALL).where(wanted))
        rank = {place: number for number, place in enumerate(order)}
        first: dict[str, SecretRecord] = {}
        for record in sorted(found, key=lambda record: rank[record.kind, record.scope]):
            first.setdefault(record.name, record)
        return [first[name] for name in sorted(first)]

    async def delete(self, kind: ScopeKind, scope: str, name: str) -> bool:
        """Forget a secret; False when there was none."""
        statement = delete(secrets).where(_is(kind, scope, name))
        return await self._database.write(lambda connection: connection.execute(statement).rowcount) == 1

    async def forget(self, kind: ScopeKind, scope: str) -> int:
        """Forget everything a context or a template has, and say how many."""
        statement = delete(secrets).where(secrets.c.kind == kind, secrets.c.scope == scope)
        return await self._database.write(lambda connection: connection.execute(statement).rowcount)

    async def sealed_with(self, key_id: str, *, limit: int) -> Records:
        """At most `limit` secrets that this key sealed."""
        query = select(*_ALL).where(secrets.c.key_id == key_id)
        return await self._records(query.order_by(secrets.c.kind, secrets.c.scope, secrets.c.name).limit(limit))

    async def reseal(self, kind: ScopeKind, scope: str, name: str, *, version: int, sealed: bytes, key_id: str) -> bool:
        """Replace the sealed bytes of that version and keep all else; False when it has changed since."""
        statement = update(secrets).where(_is(kind, scope, name), secrets.c.version == version)
        statement = statement.values(sealed=sealed, key_id=key_id)
        return await self._database.write(lambda connection: connection.execute(statement).rowcount) == 1

    async def _records(self, query: Select[tuple[object, ...]]) -> Records:
        def run(connection: Connection) -> Records:
            rows = connection.execute(query).mappings()
            return [SecretRecord(**{**row, "sealed": bytes(row["sealed"])}) for row in rows]

        return await self._database.read(run)


def _is(kind: ScopeKind, scope: str, name: str) -> ColumnElement[bool]:
    return and_(secrets.c.kind == kind, secrets.c.scope == scope, secrets.c.name == name)


def _put(
    connection: Connection,
    kind: ScopeKind,
    scope: str,
    name: str,
    sealed: bytes,
    key_id: str,
    now: float,
) -> SecretInfo:
    changed = update(secrets).where(_is(kind, scope, name))
    changed = changed.values(sealed=sealed, key_id=key_id, version=secrets.c.version + 1, updated_at=now)
    if connection.execute(changed).rowcount == 0:
        count = select(func.count()).where(secrets.c.kind == kind, secrets.c.scope == scope)
        if connection.execute(count).scalar_one() >= MOST:
            raise LimitExceeded(
                f"a {kind} may have at most {MOST} secrets", field="name", hint="delete what is not used any more"
            )
        row = {"kind": kind, "scope": scope, "name": name, "sealed": sealed, "key_id": key_id, "version": 1}
        connection.execute(insert(secrets).values(**row, created_at=now, updated_at=now))
    found = connection.execute(select(*_SHOWN).where(_is(kind, scope, name))).mappings().one()
    return SecretInfo(**found)
