"""The queries on filespace entries: per context, the newest known state of each path, in the order it became known.

Knows no file: contents are named by their hash. Times are the database's own. The files of a context always form a
tree: a write to `a/b` ends a file `a`, a write to `a` ends every file beneath `a/`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import BindParameter, ColumnElement, Select, bindparam, delete, func, insert, select, update
from sqlalchemy.engine import Connection

from carrel.errors import InvalidRequest
from carrel.store.clock import database_clock
from carrel.store.database import Database
from carrel.store.tables import filespace_entries as entries

_LOCK = 0x66696C65  # "file": the first half of the advisory lock on the entries of a context
_BATCH = 500  # SQLite takes a limited number of values in a statement
_FEW = 8  # so many times the rows of a context are looked through rather than read
_TICK = 1e-6


@dataclass(frozen=True, slots=True)
class FilespaceEntry:
    """One path of a context. `deleted` is a tombstone, which tells what was deleted; `version` orders all changes."""

    context_id: str
    path: str
    hash: str | None
    size: int
    mode: int
    updated_at: float
    deleted: bool
    version: int


@dataclass(frozen=True, slots=True)
class FilespaceChange:
    """A file to write, or without a `hash` one to delete: with `expected` only while its entry has that version."""

    path: str
    hash: str | None = None
    size: int = 0
    mode: int = 0
    expected: int | None = None


@dataclass(frozen=True, slots=True)
class FilespaceMark:
    """A tombstone that is no file's: stored together with changes, it tells who made them that they are stored."""

    path: str
    hash: str
    size: int


@dataclass(frozen=True, slots=True)
class Stored:
    """What became of changes: the entries that are new, and the newest version before them and with them."""

    entries: list[FilespaceEntry]
    before: int
    newest: int


_COLUMNS = tuple(entries.c[name] for name in FilespaceEntry.__slots__)


def _key(path: str) -> str:
    return hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()


def _parents(path: str) -> Iterable[str]:
    while (cut := path.rfind("/")) > 0:
        path = path[:cut]
        yield path


class FilespaceStore:
    """Reads and writes filespace entries."""

    def __init__(self, database: Database, clock: Callable[[], ColumnElement[float]] = database_clock):
        self._database = database
        self._clock = clock

    async def put(
        self, context_id: str, changes: Iterable[FilespaceChange], mark: FilespaceMark | None = None
    ) -> Stored:
        """Store changes in one transaction, stamped with the database's time; that of a path never goes back.

        Of two changes of one path the last counts. A deletion of what is not there is nothing. Versions grow in the
        order of commits, so a reader of `changed` misses nothing.
        """
        wanted = {change.path: change for change in changes}
        return await self._database.write(lambda connection: _put(connection, context_id, wanted, mark, self._clock()))

    async def get(self, context_id: str, path: str) -> FilespaceEntry | None:
        """The entry of a path, tombstones included."""
        found = await self._all(_of(context_id).where(entries.c.path_key == _key(path)))
        return found[0] if found else None

    async def changed(self, context_id: str, *, after: int = 0, limit: int = 1000) -> list[FilespaceEntry]:
        """At most `limit` entries whose version is above `after`, in the order of versions."""
        return await self._all(
            _of(context_id).where(entries.c.version > after).order_by(entries.c.version).limit(limit)
        )

    async def newest(self, context_id: str) -> tuple[int, float]:
        """The newest version of a context, 0 when it has none, and the time by the database's clock."""
        query = select(func.coalesce(func.max(entries.c.version), 0), self._clock())
        query = query.where(entries.c.context_id == context_id)

        def run(connection: Connection) -> tuple[int, float]:
            version, now = connection.execute(query).one()
            return int(version), float(now)

        return await self._database.read(run)

    async def page(
        self, context_id: str, *, prefix: str = "", limit: int, cursor: str | None = None
    ) -> tuple[list[FilespaceEntry], str | None]:
        """Files in the order of their paths, at most `limit` after `cursor`, and the cursor of the next page."""
        query = _of(context_id).where(entries.c.deleted.is_(False))
        if prefix:
            size = len(prefix.encode("utf-8", "surrogateescape"))
            query = query.where(func.substr(entries.c.path, 1, size, type_=entries.c.path.type) == prefix)
        if cursor is not None:
            query = query.where(entries.c.path > _place(cursor))
        found = await self._all(query.order_by(entries.c.path).limit(limit + 1))
        return found[:limit], _cursor(found[limit - 1].path) if len(found) > limit else None

    async def size(self, context_id: str) -> tuple[int, int]:
        """How many files a context has, and their bytes together."""
        query = select(func.count(), func.coalesce(func.sum(entries.c.size), 0))
        query = query.where(entries.c.context_id == context_id, entries.c.deleted.is_(False))

        def run(connection: Connection) -> tuple[int, int]:
            count, size = connection.execute(query).one()
            return int(count), int(size)

        return await self._database.read(run)

    async def hashes(self, context_id: str) -> set[str]:
        """The contents that the files of a context have."""
        query = select(entries.c.hash).where(entries.c.context_id == context_id, entries.c.deleted.is_(False))
        return await self._database.read(lambda connection: set(connection.execute(query.distinct()).scalars()))

    async def forget_tombstones(self, context_id: str, age_s: float) -> int:
        """Remove tombstones older than that, and say how many. The newest version stays: it is never reused."""
        newest = select(func.max(entries.c.version)).where(entries.c.context_id == context_id).scalar_subquery()
        statement = delete(entries).where(
            entries.c.context_id == context_id,
            entries.c.deleted.is_(True),
            entries.c.updated_at < self._clock() - age_s,
            entries.c.version < newest,
        )

        def run(connection: Connection) -> int:
            _lock(connection, context_id)
            return connection.execute(statement).rowcount

        return await self._database.write(run)

    async def forget(self, context_id: str) -> None:
        """Remove every entry of a context."""
        statement = delete(entries).where(entries.c.context_id == context_id)
        await self._database.execute(statement)

    async def _all(self, query: Select[tuple[object, ...]]) -> list[FilespaceEntry]:
        return await self._database.all(query, lambda row: FilespaceEntry(**row))


def _of(context_id: str) -> Select[tuple[object, ...]]:
    return select(*_COLUMNS).where(entries.c.context_id == context_id)


def _cursor(path: str) -> str:
    return base64.urlsafe_b64encode(path.encode("utf-8", "surrogateescape")).decode().rstrip("=")


def _place(cursor: str) -> str:
    try:
        raw = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
    except (ValueError, binascii.Error):
        raise InvalidRequest(
            "the cursor is not one this server gave", field="cursor", hint="take `next` of the page before"
        ) from None
    return raw.decode("utf-8", "surrogateescape")


def _lock(connection: Connection, context_id: str) -> None:
    """One writer of a context at a time; on SQLite the transaction has seen to that."""
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_LOCK, func.hashtext(context_id))))


@dataclass(frozen=True, slots=True)
class _Known:
    path: str
    hash: str | None
    size: int
    mode: int
    updated_at: float
    deleted: bool
    version: int


_KNOWN = select(*(entries.c[name] for name in _Known.__slots__))


def _known(connection: Connection, context_id: str, paths: Iterable[str]) -> dict[str, _Known]:
    keys = [_key(path) for path in paths]
    found: dict[str, _Known] = {}
    for start in range(0, len(keys), _BATCH):
        some = _KNOWN.where(entries.c.context_id == context_id, entries.c.path_key.in_(keys[start : start + _BATCH]))
        found.update((row["path"], _Known(**row)) for row in connection.execute(some).mappings())
    return found


def _beneath(connection: Connection, context_id: str, paths: Sequence[str]) -> dict[str, _Known]:
    """The files that lie beneath paths which are about to become files themselves."""
    live = _KNOWN.where(entries.c.context_id == context_id, entries.c.deleted.is_(False))
    found: dict[str, _Known] = {}
    if len(paths) <= _FEW:
        for path in paths:
            some = live.where(entries.c.path > f"{path}/", entries.c.path < f"{path}0")
            found.update((row["path"], _Known(**row)) for row in connection.execute(some).mappings())
        return found
    rows = [_Known(**row) for row in connection.execute(live.order_by(entries.c.path)).mappings()]
    names = [row.path.encode("utf-8", "surrogateescape") for row in rows]
    for path in paths:
        raw = path.encode("utf-8", "surrogateescape")
        for row in rows[bisect_left(names, raw + b"/") : bisect_left(names, raw + b"0")]:
            found[row.path] = row
    return found


def _displaced(
    connection: Connection, context_id: str, wanted: dict[str, FilespaceChange], known: dict[str, _Known]
) -> dict[str, _Known]:
    """The files that cannot be there together with those that are written."""
    new = [
        path
        for path, change in wanted.items()
        if change.hash is not None and (path not in known or known[path].deleted)
    ]
    above = _known(connection, context_id, {parent for path in new for parent in _parents(path)})
    found = {path: row for path, row in above.items() if not row.deleted}
    return found | _beneath(connection, context_id, new) if new else found


def _put(
    connection: Connection,
    context_id: str,
    wanted: dict[str, FilespaceChange],
    mark: FilespaceMark | None,
    clock: ColumnElement[float],
) -> Stored:
    _lock(connection, context_id)
    query = select(func.coalesce(func.max(entries.c.version), 0)).where(entries.c.context_id == context_id)
    before = version = int(connection.execute(query).scalar_one())
    if not wanted and mark is None:
        return Stored([], before, before)
    written = [path for path, change in wanted.items() if change.hash is not None]
    for above in {parent for path in written for parent in _parents(path)}:
        wanted.pop(above, None)
    known = _known(connection, context_id, [*wanted, *((mark.path,) if mark is not None else ())])
    displaced = _displaced(connection, context_id, wanted, known)
    for path in displaced:
        wanted[path] = FilespaceChange(path)
    known |= displaced
    now = float(connection.execute(select(clock)).scalar_one())
    stored: list[FilespaceEntry] = []
    for path, change in wanted.items():
        row = known.get(path)
        deleted = change.hash is None
        if deleted and (row is None or row.deleted or change.expected not in {None, row.version}):
            continue
        version += 1
        stamp = now if row is None else max(now, row.updated_at + _TICK)
        content = row if deleted and row is not None else change
        stored.append(
            FilespaceEntry(context_id, path, content.hash, content.size, content.mode, stamp, deleted, version)
        )
    marks = []
    if mark is not None:
        version += 1
        marks.append(FilespaceEntry(context_id, mark.path, mark.hash, mark.size, 0, now, True, version))
    _write(connection, context_id, [*stored, *marks], known)
    return Stored(stored, before, version)


def _write(connection: Connection, context_id: str, stored: list[FilespaceEntry], known: dict[str, _Known]) -> None:
    added = [{**asdict(entry), "path_key": _key(entry.path)} for entry in stored if entry.path not in known]
    replaced = [{**asdict(entry), "of": context_id, "key": _key(entry.path)} for entry in stored if entry.path in known]
    if added:
        connection.execute(insert(entries), added)
    if replaced:
        changes: dict[str, BindParameter[object]] = {
            name: bindparam(name) for name in FilespaceEntry.__slots__ if name not in ("context_id", "path")
        }
        statement = update(entries).where(
            entries.c.context_id == bindparam("of"), entries.c.path_key == bindparam("key")
        )
        connection.execute(statement.values(**changes), replaced)
