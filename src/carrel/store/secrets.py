"""The queries on secrets. Knows sealed values only: what opens them is not here, and nothing here shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sqlalchemy import ColumnElement, Select, Table, and_, delete, func, insert, literal, or_, select, update
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from carrel.errors import LimitExceeded
from carrel.store.clock import database_clock
from carrel.store.database import Database
from carrel.store.tables import former_secrets, secrets, sessions

ScopeKind = Literal["context", "template"]
"""What a secret belongs to."""
Place = tuple[ScopeKind, str]
Places = Sequence[Place]

MOST = 256
"""Secrets a context or a template may have."""
MOST_FORMER = 16
"""Former values of one secret that are remembered."""
Mark = tuple[int, float | None, int | None]
"""How many secrets there are, when one was last put, and the newest of the former ones."""
Sizes = Mapping[str, int]
"""How many bytes the sealed values have that a sandbox would get, by the names of the secrets."""


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


@dataclass(frozen=True, slots=True)
class FormerSecret:
    """A value that a secret had, sealed: a sandbox that runs may have seen it."""

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
        """Store a secret or the next version of it; `LimitExceeded` when its scope has too many.

        `check` is called with the sizes of what a sandbox would have that has the secrets of this place alone, and of
        what each of `sandboxes` would have; what it raises undoes the whole.
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
        """The secret with its sealed value."""
        found = await self._records(select(*_ALL).where(_is(kind, scope, name)))
        return found[0] if found else None

    async def list(self, kind: ScopeKind, scope: str) -> Infos:
        """What a context or a template has, by name, without any value."""
        query = select(*_SHOWN).where(secrets.c.kind == kind, secrets.c.scope == scope).order_by(secrets.c.name)
        return await self._database.all(query, lambda row: SecretInfo(**row))

    async def of_scope(self, context: str | None, templates: Sequence[str] = ()) -> Records:
        """What a sandbox gets, by name: the secrets of its context, and of each template those that no earlier has."""
        order = places_of(context, templates)
        if not order:
            return []
        found = await self._records(select(*_ALL).where(_any_of(secrets, order)))
        rank = {place: number for number, place in enumerate(order)}
        first: dict[str, SecretRecord] = {}
        for record in sorted(found, key=lambda record: rank[record.kind, record.scope]):
            first.setdefault(record.name, record)
        return [first[name] for name in sorted(first)]

    async def delete(self, kind: ScopeKind, scope: str, name: str) -> bool:
        """Forget a secret; False when there was none. Its value stays among the former ones."""

        def run(connection: Connection) -> bool:
            _keep_former(connection, kind, scope, name)
            return connection.execute(delete(secrets).where(_is(kind, scope, name))).rowcount == 1

        return await self._database.write(run)

    async def former(self, context: str | None, templates: Sequence[str] = ()) -> Formers:
        """Values that a context's and a template's secrets had, the newest first."""
        order = places_of(context, templates)
        if not order:
            return []
        query = select(*_FORMER).where(_any_of(former_secrets, order))
        return await self._formers(query.order_by(former_secrets.c.id.desc()))

    async def mark(self) -> Mark:
        """Another one whenever any secret was put, changed or deleted, by whichever server."""
        newest = select(func.max(former_secrets.c.id)).scalar_subquery()
        query = select(func.count(), func.max(secrets.c.updated_at), newest).select_from(secrets)
        return await self._database.read(lambda connection: tuple(connection.execute(query).one()))

    async def forget_former(self, states: Iterable[str]) -> int:
        """Forget the former values that no sandbox can have seen, as none of their context or template is in one of
        these states; how many.
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
        """Forget everything a context or a template has or had, and say how many secrets it had."""

        def run(connection: Connection) -> int:
            for table in (former_secrets, secrets):
                done = connection.execute(delete(table).where(table.c.kind == kind, table.c.scope == scope))
            return done.rowcount

        return await self._database.write(run)

    async def sealed_with(self, key_id: str, *, limit: int, skip: int = 0) -> Records:
        """At most `limit` secrets that this key sealed, without the first `skip`."""
        query = select(*_ALL).where(secrets.c.key_id == key_id)
        query = query.order_by(secrets.c.kind, secrets.c.scope, secrets.c.name)
        return await self._records(query.limit(limit).offset(skip))

    async def reseal(self, kind: ScopeKind, scope: str, name: str, *, version: int, sealed: bytes, key_id: str) -> bool:
        """Replace the sealed bytes of that version and keep all else; False when it has changed since."""
        statement = update(secrets).where(_is(kind, scope, name), secrets.c.version == version)
        statement = statement.values(sealed=sealed, key_id=key_id)
        return await self._database.execute(statement) == 1

    async def former_sealed_with(self, key_id: str, *, limit: int, skip: int = 0) -> Formers:
        """At most `limit` former values that this key sealed, without the first `skip`."""
        query = select(*_FORMER).where(former_secrets.c.key_id == key_id).order_by(former_secrets.c.id)
        return await self._formers(query.limit(limit).offset(skip))

    async def reseal_former(self, id: int, *, sealed: bytes, key_id: str) -> bool:
        """Replace the sealed bytes of a former value and keep all else; False when it is forgotten since."""
        statement = update(former_secrets).where(former_secrets.c.id == id).values(sealed=sealed, key_id=key_id)
        return await self._database.execute(statement) == 1

    async def not_sealed_with(self, key_id: str) -> int:
        """How many values, former ones too, other keys than this one have sealed."""
        counts = (
            select(func.count()).select_from(table).where(table.c.key_id != key_id).scalar_subquery()
            for table in (secrets, former_secrets)
        )
        query = select(sum(counts, start=literal(0)))
        return await self._database.read(lambda connection: int(connection.execute(query).scalar_one()))

    async def _formers(self, query: Select[tuple[object, ...]]) -> Formers:
        return await self._database.all(query, lambda row: FormerSecret(**{**row, "sealed": bytes(row["sealed"])}))

    async def _records(self, query: Select[tuple[object, ...]]) -> Records:
        return await self._database.all(query, lambda row: SecretRecord(**{**row, "sealed": bytes(row["sealed"])}))


def places_of(context: str | None, templates: Sequence[str] = ()) -> Places:
    """Whose secrets a sandbox gets, the first to be asked first."""
    order: list[Place] = [("context", context)] if context is not None else []
    return [*order, *(("template", name) for name in dict.fromkeys(templates))]


def _any_of(table: Table, places: Places) -> ColumnElement[bool]:
    return or_(*(and_(table.c.kind == kind, table.c.scope == scope) for kind, scope in places))


def _sizes(connection: Connection, order: Places) -> Sizes:
    query = select(secrets.c.kind, secrets.c.scope, secrets.c.name, func.length(secrets.c.sealed).label("size"))
    found = connection.execute(query.where(_any_of(secrets, order))).mappings().all()
    rank = {place: number for number, place in enumerate(order)}
    sizes: dict[str, int] = {}
    for row in sorted(found, key=lambda row: rank[row["kind"], row["scope"]]):
        sizes.setdefault(row["name"], row["size"])
    return sizes


def _keep_former(connection: Connection, kind: ScopeKind, scope: str, name: str) -> None:
    """Remember the value that a secret has, and no more of older ones than there is room for."""
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
                f"a {kind} may have at most {MOST} secrets", field="name", hint="delete what is not used any more"
            )
        row = {"kind": kind, "scope": scope, "name": name, "sealed": sealed, "key_id": key_id, "version": 1}
        connection.execute(insert(secrets).values(**row, created_at=now, updated_at=now))
    found = connection.execute(select(*_SHOWN).where(_is(kind, scope, name))).mappings().one()
    return SecretInfo(**found)
