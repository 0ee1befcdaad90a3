"""The queries on filespace entries: the newest known state of each path of a context, ordered by version.

Contents are named by their hash. Times come from the database's clock. The files of a context always form a tree: a
write to `a/b` deletes a file `a`, and a write to `a` deletes every file below `a/`.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import BindParameter, ColumnElement, Select, bindparam, delete, func, insert, select, update
from sqlalchemy.engine import Connection, RowMapping

from carrel.store.clock import database_clock
from carrel.store.cursors import decode_bytes, encode_bytes
from carrel.store.database import Database
from carrel.store.tables import filespace_entries as entries

_LOCK = 0x66696C65  # "file": the first key of the advisory lock on the entries of a context
_BATCH = 500  # SQLite takes a limited number of values in a statement
_MOST_RANGE_QUERIES = 8  # for more paths, all rows of a context are read once instead
_TICK = 1e-6


@dataclass(frozen=True, slots=True)
class FilespaceEntry:
    """One path of a context. With `deleted` it is a tombstone of a deleted file; `version` orders all changes."""

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
    """A file to write, or without a `hash` to delete; with `expected` it is deleted only while it has that version."""

    path: str
    hash: str | None = None
    size: int = 0
    mode: int = 0
    expected: int | None = None


@dataclass(frozen=True, slots=True)
class FilespaceMark:
    """A tombstone that belongs to no file. Stored with a batch of changes, it proves that the batch was stored."""

    path: str
    hash: str
    size: int


@dataclass(frozen=True, slots=True)
class StoredChanges:
    """The result of storing changes: the new entries, and the newest version before and after."""

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
    ) -> StoredChanges:
        """Store changes in one transaction, with the database's time; the time of a path never decreases.

        Of two changes of one path the last counts. Deleting a missing file does nothing. Versions grow in the order of
        commits, so a reader of `changed` misses nothing.
        """
        wanted = {change.path: change for change in changes}
        return await self._database.write(lambda connection: _put(connection, context_id, wanted, mark, self._clock()))

    async def get(self, context_id: str, path: str) -> FilespaceEntry | None:
        """Return the entry of a path, which may be a tombstone."""
        return await self._database.first(_of(context_id).where(entries.c.path_key == _key(path)), _entry)

    async def changed(self, context_id: str, *, after: int = 0, limit: int = 1000) -> list[FilespaceEntry]:
        """Return at most `limit` entries with a version above `after`, ordered by version."""
        query = _of(context_id).where(entries.c.version > after).order_by(entries.c.version)
        return await self._database.all(query.limit(limit), _entry)

    async def newest(self, context_id: str) -> tuple[int, float]:
        """Return the newest version of a context (0 when it has none), and the time by the database's clock."""
        query = select(func.coalesce(func.max(entries.c.version), 0), self._clock())
        [(version, now)] = await self._database.rows(query.where(entries.c.context_id == context_id))
        return int(version), float(now)

    async def page(
        self, context_id: str, *, prefix: str = "", limit: int, cursor: str | None = None
    ) -> tuple[list[FilespaceEntry], str | None]:
        """Return at most `limit` files after `cursor`, ordered by path, and the cursor of the next page."""
        query = _of(context_id).where(entries.c.deleted.is_(False))
        if prefix:
            size = len(prefix.encode("utf-8", "surrogateescape"))
            query = query.where(func.substr(entries.c.path, 1, size, type_=entries.c.path.type) == prefix)
        if cursor is not None:
            query = query.where(entries.c.path > decode_bytes(cursor).decode("utf-8", "surrogateescape"))
        found = await self._database.all(query.order_by(entries.c.path).limit(limit + 1), _entry)
        last = encode_bytes(found[limit - 1].path.encode("utf-8", "surrogateescape")) if len(found) > limit else None
        return found[:limit], last

    async def size(self, context_id: str) -> tuple[int, int]:
        """Return the number of files of a context and their total size."""
        query = select(func.count(), func.coalesce(func.sum(entries.c.size), 0))
        query = query.where(entries.c.context_id == context_id, entries.c.deleted.is_(False))
        [(count, size)] = await self._database.rows(query)
        return int(count), int(size)

    async def hashes(self, context_id: str) -> set[str]:
        """Return the hashes of all files of a context."""
        query = select(entries.c.hash).where(entries.c.context_id == context_id, entries.c.deleted.is_(False))
        return set(await self._database.scalars(query.distinct()))

    async def forget_tombstones(self, context_id: str, age_s: float) -> int:
        """Remove tombstones older than `age_s` and return how many. The newest version stays, so none is reused."""
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
        await self._database.execute(delete(entries).where(entries.c.context_id == context_id))


def _entry(row: RowMapping) -> FilespaceEntry:
    return FilespaceEntry(**row)


def _of(context_id: str) -> Select[tuple[object, ...]]:
    return select(*_COLUMNS).where(entries.c.context_id == context_id)


def _lock(connection: Connection, context_id: str) -> None:
    """Let only one transaction at a time write to a context; on SQLite the transaction itself does that."""
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_LOCK, func.hashtext(context_id))))


def _known(connection: Connection, context_id: str, paths: Iterable[str]) -> dict[str, FilespaceEntry]:
    keys = [_key(path) for path in paths]
    found: dict[str, FilespaceEntry] = {}
    for start in range(0, len(keys), _BATCH):
        some = _of(context_id).where(entries.c.path_key.in_(keys[start : start + _BATCH]))
        found.update((row["path"], _entry(row)) for row in connection.execute(some).mappings())
    return found


def _beneath(connection: Connection, context_id: str, paths: Sequence[str]) -> dict[str, FilespaceEntry]:
    """Return the files below paths that are about to become files themselves."""
    live = _of(context_id).where(entries.c.deleted.is_(False))
    found: dict[str, FilespaceEntry] = {}
    if len(paths) <= _MOST_RANGE_QUERIES:
        for path in paths:
            some = live.where(entries.c.path > f"{path}/", entries.c.path < f"{path}0")
            found.update((row["path"], _entry(row)) for row in connection.execute(some).mappings())
        return found
    rows = [_entry(row) for row in connection.execute(live.order_by(entries.c.path)).mappings()]
    names = [row.path.encode("utf-8", "surrogateescape") for row in rows]
    for path in paths:
        raw = path.encode("utf-8", "surrogateescape")
        for row in rows[bisect_left(names, raw + b"/") : bisect_left(names, raw + b"0")]:
            found[row.path] = row
    return found


def _displaced(
    connection: Connection, context_id: str, wanted: dict[str, FilespaceChange], known: dict[str, FilespaceEntry]
) -> dict[str, FilespaceEntry]:
    """Return the files that cannot coexist with the written ones, as a parent of one or below one."""
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
) -> StoredChanges:
    _lock(connection, context_id)
    query = select(func.coalesce(func.max(entries.c.version), 0)).where(entries.c.context_id == context_id)
    before = version = int(connection.execute(query).scalar_one())
    if not wanted and mark is None:
        return StoredChanges([], before, before)
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
    return StoredChanges(stored, before, version)


def _write(
    connection: Connection, context_id: str, stored: list[FilespaceEntry], known: dict[str, FilespaceEntry]
) -> None:
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
