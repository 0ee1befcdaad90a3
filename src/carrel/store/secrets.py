"""The queries on secrets. Handles only sealed (encrypted) values; `carrel.secrets` seals and opens them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sqlalchemy import ColumnElement, Table, and_, delete, func, insert, literal, or_, select, update
from sqlalchemy.engine import Connection, RowMapping
from sqlalchemy.exc import IntegrityError

from carrel.errors import LimitExceeded
from carrel.store.clock import database_clock
from carrel.store.database import Database
from carrel.store.tables import former_secrets, secrets, sessions

ScopeKind = Literal["context", "template"]
"""The kind of thing that a secret belongs to."""
Place = tuple[ScopeKind, str]
Places = Sequence[Place]

MOST = 256
"""The most secrets of one context or template."""
MOST_FORMER = 16
"""The most former values kept of one secret."""
Mark = tuple[int, float | None, int | None]
"""Number of secrets, time of the last put, and id of the newest former value; changes with every change of a secret."""
Sizes = Mapping[str, int]
"""The sizes of the sealed values that a sandbox would get, by name."""


@dataclass(frozen=True, slots=True)
class SecretInfo:
    """The public part of a secret. `version` counts how often it was put."""

    kind: ScopeKind
    scope: str
    name: str
    version: int
    created_at: float
    updated_at: float


@dataclass(frozen=True, slots=True)
class SecretRecord(SecretInfo):
    """A row of the table of secrets: with the sealed value and the id of the key that sealed it."""

    key_id: str
    sealed: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class FormerSecret:
    """A sealed former value of a secret, which a running sandbox may have seen."""

    id: int
    kind: ScopeKind
    scope: str
    name: str
    version: int
    key_id: str
    sealed: bytes = field(repr=False)


Infos = list[SecretInfo]
Records = list[SecretRecord]
Formers = list[FormerSecret]

_SHOWN = tuple(secrets.c[name] for name in SecretInfo.__slots__)
_ALL = (*_SHOWN, secrets.c.key_id, secrets.c.sealed)
_FORMER = tuple(former_secrets.c[name] for name in FormerSecret.__slots__)


class SecretStore:
    """Reads and writes sealed secrets."""

    def __init__(self, database: Database, clock: Callable[[], ColumnElement[float]] = database_clock):
        self._database = database
        self._clock = clock

    async def put(
        self,
        kind: ScopeKind,
        scope: str,
        name: str,
        *,
        sealed: bytes,
        key_id: str,
        sandboxes: Sequence[Places],
        check: Callable[[Sizes], None],
    ) -> SecretInfo:
        """Store a secret or its next version; `LimitExceeded` when its scope has too many.

        `check` is called with the sizes for a sandbox that has only the secrets of this place, and for each of
        `sandboxes`; an exception from it rolls everything back.
        """

        def run(connection: Connection) -> SecretInfo:
            now = float(connection.execute(select(self._clock())).scalar_one())
            info = _put(connection, kind, scope, name, sealed, key_id, now)
            for places in dict.fromkeys([((kind, scope),), *map(tuple, sandboxes)]):
                check(_sizes(connection, places))
            return info

        try:
            return await self._database.write(run)
        except IntegrityError:  # somebody stored it first, at the same moment
            return await self._database.write(run)

    async def get(self, kind: ScopeKind, scope: str, name: str) -> SecretRecord | None:
        """Return a secret with its sealed value."""
        return await self._database.first(select(*_ALL).where(_is(kind, scope, name)), _record)

    async def list(self, kind: ScopeKind, scope: str) -> Infos:
        """Return the secrets of a context or template, ordered by name, without values."""
        query = select(*_SHOWN).where(secrets.c.kind == kind, secrets.c.scope == scope).order_by(secrets.c.name)
        return await self._database.all(query, lambda row: SecretInfo(**row))

    async def of_scope(self, context: str | None, templates: Sequence[str] = ()) -> Records:
        """Return the secrets of a sandbox, ordered by name. The context comes before the templates, in their order; for
        each name the first one wins.
        """
        order = places_of(context, templates)
        if not order:
            return []
        found = await self._database.all(select(*_ALL).where(_any_of(secrets, order)), _record)
        first: dict[str, SecretRecord] = {}
        for record in sorted(found, key=lambda record: order.index((record.kind, record.scope))):
            first.setdefault(record.name, record)
        return [first[name] for name in sorted(first)]

    async def delete(self, kind: ScopeKind, scope: str, name: str) -> bool:
        """Delete a secret; False when there was none. Its value is kept as a former value."""

        def run(connection: Connection) -> bool:
            _keep_former(connection, kind, scope, name)
            return connection.execute(delete(secrets).where(_is(kind, scope, name))).rowcount == 1

        return await self._database.write(run)

    async def former(self, context: str | None, templates: Sequence[str] = ()) -> Formers:
        """Return the former values of the secrets of a sandbox, newest first."""
        order = places_of(context, templates)
        if not order:
            return []
        query = select(*_FORMER).where(_any_of(former_secrets, order))
        return await self._database.all(query.order_by(former_secrets.c.id.desc()), _former)

    async def mark(self) -> Mark:
        """Return a mark that changes whenever any server puts or deletes a secret."""
        newest = select(func.max(former_secrets.c.id)).scalar_subquery()
        query = select(func.count(), func.max(secrets.c.updated_at), newest).select_from(secrets)
        [row] = await self._database.rows(query)
        return tuple(row)

    async def forget_former(self, states: Iterable[str]) -> int:
        """Delete the former values of contexts and templates without a session in one of these states, because no
        sandbox can have seen them; return how many.
        """
        live = sessions.c.state.in_([*states])
        contexts = select(sessions.c.context_id).where(live, sessions.c.context_id.is_not(None))
        templates = select(sessions.c.template).where(live, sessions.c.template.is_not(None))
        table = former_secrets.c
        statement = delete(former_secrets).where(
            or_(
                and_(table.kind == "context", table.scope.not_in(contexts)),
                and_(table.kind == "template", table.scope.not_in(templates)),
            )
        )
        return await self._database.execute(statement)

    async def forget(self, kind: ScopeKind, scope: str) -> int:
        """Delete all secrets and former values of a context or template, and return the number of secrets."""

        def run(connection: Connection) -> int:
            for table in (former_secrets, secrets):
                done = connection.execute(delete(table).where(table.c.kind == kind, table.c.scope == scope))
            return done.rowcount

        return await self._database.write(run)

    async def sealed_with(self, key_id: str, *, limit: int, skip: int = 0) -> Records:
        """Return at most `limit` secrets that this key sealed, without the first `skip`."""
        query = select(*_ALL).where(secrets.c.key_id == key_id)
        query = query.order_by(secrets.c.kind, secrets.c.scope, secrets.c.name)
        return await self._database.all(query.limit(limit).offset(skip), _record)

    async def reseal(self, kind: ScopeKind, scope: str, name: str, *, version: int, sealed: bytes, key_id: str) -> bool:
        """Replace the sealed bytes of this version; False when the secret has changed since."""
        statement = update(secrets).where(_is(kind, scope, name), secrets.c.version == version)
        statement = statement.values(sealed=sealed, key_id=key_id)
        return await self._database.execute(statement) == 1

    async def former_sealed_with(self, key_id: str, *, limit: int, skip: int = 0) -> Formers:
        """Return at most `limit` former values that this key sealed, without the first `skip`."""
        query = select(*_FORMER).where(former_secrets.c.key_id == key_id).order_by(former_secrets.c.id)
        return await self._database.all(query.limit(limit).offset(skip), _former)

    async def reseal_former(self, id: int, *, sealed: bytes, key_id: str) -> bool:
        """Replace the sealed bytes of a former value; False when it was deleted since."""
        statement = update(former_secrets).where(former_secrets.c.id == id).values(sealed=sealed, key_id=key_id)
        return await self._database.execute(statement) == 1

    async def not_sealed_with(self, key_id: str) -> int:
        """Count the values, former ones included, that another key sealed."""
        counts = (
            select(func.count()).select_from(table).where(table.c.key_id != key_id).scalar_subquery()
            for table in (secrets, former_secrets)
        )
        return int((await self._database.scalars(select(sum(counts, start=literal(0)))))[0])


def _record(row: RowMapping) -> SecretRecord:
    return SecretRecord(**{**row, "sealed": bytes(row["sealed"])})


def _former(row: RowMapping) -> FormerSecret:
    return FormerSecret(**{**row, "sealed": bytes(row["sealed"])})


def places_of(context: str | None, templates: Sequence[str] = ()) -> Places:
    """Return the places of a sandbox's secrets, in order of precedence."""
    order: list[Place] = [("context", context)] if context is not None else []
    return [*order, *(("template", name) for name in dict.fromkeys(templates))]


def _any_of(table: Table, places: Places) -> ColumnElement[bool]:
    return or_(*(and_(table.c.kind == kind, table.c.scope == scope) for kind, scope in places))


def _sizes(connection: Connection, order: Places) -> Sizes:
    query = select(secrets.c.kind, secrets.c.scope, secrets.c.name, func.length(secrets.c.sealed).label("size"))
    found = connection.execute(query.where(_any_of(secrets, order))).mappings().all()
    sizes: dict[str, int] = {}
    for row in sorted(found, key=lambda row: order.index((row["kind"], row["scope"]))):
        sizes.setdefault(row["name"], row["size"])
    return sizes


def _keep_former(connection: Connection, kind: ScopeKind, scope: str, name: str) -> None:
    """Keep the current value of a secret as a former one, and drop the oldest beyond `MOST_FORMER`."""
    names = ("kind", "scope", "name", "version", "sealed", "key_id")
    values = select(*(secrets.c[each] for each in names)).where(_is(kind, scope, name))
    connection.execute(insert(former_secrets).from_select(names, values))
    table = former_secrets.c
    same = and_(table.kind == kind, table.scope == scope, table.name == name)
    newest = select(table.id).where(same).order_by(table.id.desc()).limit(MOST_FORMER)
    connection.execute(delete(former_secrets).where(same, table.id.not_in(newest)))


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
    _keep_former(connection, kind, scope, name)
    changed = update(secrets).where(_is(kind, scope, name))
    changed = changed.values(sealed=sealed, key_id=key_id, version=secrets.c.version + 1, updated_at=now)
    if connection.execute(changed).rowcount == 0:
        count = select(func.count()).where(secrets.c.kind == kind, secrets.c.scope == scope)
        if connection.execute(count).scalar_one() >= MOST:
            raise LimitExceeded(
                f"a {kind} may have at most {MOST} secrets", field="name", hint="delete some that are not used any more"
            )
        row = {"kind": kind, "scope": scope, "name": name, "sealed": sealed, "key_id": key_id, "version": 1}
        connection.execute(insert(secrets).values(**row, created_at=now, updated_at=now))
    found = connection.execute(select(*_SHOWN).where(_is(kind, scope, name))).mappings().one()
    return SecretInfo(**found)
