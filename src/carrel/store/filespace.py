"""The queries on filespace entries: per context, the newest known state of each path, in the order it became known.

Knows no file: contents are named by their hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import BindParameter, Select, bindparam, delete, func, insert, select, update
from sqlalchemy.engine import Connection

from carrel.store.database import Database
from carrel.store.tables import filespace_entries as entries

_LOCK = 0x66696C65  # "file": the first half of the advisory lock on the entries of a context
_BATCH = 500  # SQLite takes a limited number of values in a statement


@dataclass(frozen=True, slots=True)
class FilespaceEntry:
    """One path of a context. `deleted` is a tombstone; `version` orders the changes of a context, 0 before stored."""

    context_id: str
    path: str
    hash: str | None
    size: int
    mode: int
    updated_at: float
    deleted: bool = False
    version: int = 0


_COLUMNS = tuple(entries.c[name] for name in FilespaceEntry.__slots__)


def _key(path: str) -> str:
    return hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()


class FilespaceStore:
    """Reads and writes filespace entries."""

    def __init__(self, database: Database):
        self._database = database

    async def put(self, context_id: str, changes: Iterable[FilespaceEntry]) -> list[FilespaceEntry]:
        """Store those that are newer (`updated_at`) than what is there, in one transaction; return them, versioned.

        Of two changes of one path the newer counts. Versions grow in the order of commits, so a reader of `changed`
        misses nothing.
        """
        newest: dict[str, FilespaceEntry] = {}
        for change in changes:
            if change.context_id != context_id:
                raise ValueError("an entry of another context")
            key = _key(change.path)
            if key not in newest or newest[key].updated_at < change.updated_at:
                newest[key] = change
        if not newest:
            return []
        return await self._database.write(lambda connection: _put(connection, context_id, newest))

    async def get(self, context_id: str, path: str) -> FilespaceEntry | None:
        """The entry of a path, tombstones included."""
        found = await self._all(_of(context_id).where(entries.c.path_key == _key(path)))
        return found[0] if found else None

    async def changed(self, context_id: str, *, after: int = 0, limit: int = 1000) -> list[FilespaceEntry]:
        """At most `limit` entries whose version is above `after`, in the order of versions."""
        return await self._all(
            _of(context_id).where(entries.c.version > after).order_by(entries.c.version).limit(limit)
        )

    async def size(self, context_id: str) -> tuple[int, int]:
        """How many files a context has, and their bytes together."""
        query = select(func.count(), func.coalesce(func.sum(entries.c.size), 0))
        query = query.where(entries.c.context_id == context_id, entries.c.deleted.is_(False))

        def run(connection: Connection) -> tuple[int, int]:
            count, size = connection.execute(query).one()
            return int(count), int(size)

        return await self._database.read(run)

    async def forget_tombstones(self, context_id: str, before: float) -> int:
        """Remove tombstones older than `before`, and say how many. The newest version stays: it is never reused."""
        newest = select(func.max(entries.c.version)).where(entries.c.context_id == context_id).scalar_subquery()
        statement = delete(entries).where(
            entries.c.context_id == context_id,
            entries.c.deleted.is_(True),
            entries.c.updated_at < before,
            entries.c.version < newest,
        )

        def run(connection: Connection) -> int:
            _lock(connection, context_id)
            return connection.execute(statement).rowcount

        return await self._database.write(run)

    async def forget(self, context_id: str) -> None:
        """Remove every entry of a context."""
        statement = delete(entries).where(entries.c.context_id == context_id)
        await self._database.write(lambda connection: connection.execute(statement).close())

    async def _all(self, query: Select[tuple[object, ...]]) -> list[FilespaceEntry]:
        def run(connection: Connection) -> list[FilespaceEntry]:
            return [FilespaceEntry(**row) for row in connection.execute(query).mappings()]

        return await self._database.read(run)


def _of(context_id: str) -> Select[tuple[object, ...]]:
    return select(*_COLUMNS).where(entries.c.context_id == context_id)


def _lock(connection: Connection, context_id: str) -> None:
    """One writer of a context at a time; on SQLite the transaction has seen to that."""
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_LOCK, func.hashtext(context_id))))


def _known(connection: Connection, context_id: str, keys: Sequence[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for start in range(0, len(keys), _BATCH):
        query = select(entries.c.path_key, entries.c.updated_at).where(entries.c.context_id == context_id)
        some = query.where(entries.c.path_key.in_(keys[start : start + _BATCH]))
        found.update((row.path_key, row.updated_at) for row in connection.execute(some))
    return found


def _put(connection: Connection, context_id: str, newest: dict[str, FilespaceEntry]) -> list[FilespaceEntry]:
    _lock(connection, context_id)
    known = _known(connection, context_id, list(newest))
    query = select(func.coalesce(func.max(entries.c.version), 0)).where(entries.c.context_id == context_id)
    version = int(connection.execute(query).scalar_one())
    stored, added, replaced = [], [], []
    for key, change in newest.items():
        if key in known and known[key] >= change.updated_at:
            continue
        version += 1
        row = {**asdict(change), "version": version}
        stored.append(FilespaceEntry(**row))
        if key in known:
            replaced.append({**row, "of": context_id, "key": key})
        else:
            added.append({**row, "path_key": key})
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
    return stored
