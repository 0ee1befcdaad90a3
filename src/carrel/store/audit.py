"""The queries on audit records, signed heads, and which server writes to which chain. `audit_search` has the search.

Knows no hashes or keys: the caller links and signs records inside the transaction that writes them.
Arguments and results are plain tuples in the order of the tables' columns.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from typing import Any

from sqlalchemy import Insert, Select, delete, insert, select
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from carrel.errors import Conflict
from carrel.models.events import EventDraft
from carrel.store.audit_search import AuditSearch
from carrel.store.events import stage
from carrel.store.tables import audit_heads as heads
from carrel.store.tables import audit_holds as holds
from carrel.store.tables import audit_records as records

AuditRow = tuple[str, int, float, str, int | None, str, str, str, str, str | None, bytes, str]
"""chain, seq, at, type, ref, actor, kind, name, decision, result, hash, body"""
AuditHead = tuple[str, int, str, int, float, str, str]
"""chain, seq, hash, records, at, key, signature"""
AuditHold = tuple[str, str, int, bool]
"""chain, node, open_from, clean: the state in which a server left a chain. Clean: its last record there is signed and
all its operations have ended. Else every operation without an end has a seq of at least `open_from`.
"""
AuditTip = tuple[int, bytes, int]
"""seq and hash of the last record, seq of the newest head; 0 and no hash where there are none"""
AuditStored = tuple[int, bytes, str]
"""seq, hash, body"""

Batch = tuple[Sequence[AuditRow], Sequence[AuditHead], Sequence[AuditHold], Sequence[EventDraft]]
_RECORD = tuple(column.name for column in records.columns if column.name != "id")
_HEAD = tuple(column.name for column in heads.columns)
_HOLD = tuple(column.name for column in holds.columns)
_STORED = select(records.c.seq, records.c.hash, records.c.body)
_BATCH = 100
_INSERT = f"INSERT INTO {records.name} ({', '.join(_RECORD)}) VALUES ({', '.join('?' * len(_RECORD))})"  # noqa: S608


class AuditStore(AuditSearch):
    """Reads and writes audit records. No method changes one; only `prune` removes some, from a chain's start."""

    async def append(
        self, unknown: Collection[str], build: Callable[[Mapping[str, AuditTip]], Batch], *, short: bool = False
    ) -> None:
        """Call `build` with the tips of the `unknown` chains and add what it returns, all in one transaction. A `short`
        batch is written in the caller's thread where the database can do that.

        `Conflict` when a chain has grown meanwhile: no two records have the same position in a chain.
        """

        def run(connection: Connection) -> None:
            new, signed, held, happened = build({chain: _tip(connection, chain) for chain in unknown})
            if new:
                _insert(connection, new)
            if signed:
                connection.execute(insert(heads), [dict(zip(_HEAD, head, strict=True)) for head in signed])
            if held:
                connection.execute(_upsert(connection), [dict(zip(_HOLD, hold, strict=True)) for hold in held])
            stage(connection, happened)

        try:
            await (self._database.write_soon(run) if short else self._database.write(run))
        except IntegrityError:
            raise _grown() from None

    async def tip(self, chain: str) -> AuditTip:
        """Return the end of a chain."""
        # Two statements, so they need a transaction.
        return await self._database.write(lambda connection: _tip(connection, chain))

    async def chains(self, *, after: str = "", limit: int = 1000) -> list[str]:
        """Return the names of chains, sorted."""
        query = select(holds.c.chain).distinct().where(holds.c.chain > after).order_by(holds.c.chain).limit(limit)
        return await self._database.scalars(query)

    async def unclean(self, *nodes: str) -> list[AuditHold]:
        """Return the chains that servers wrote to and did not leave clean."""
        return await self._tuples(select(holds).where(holds.c.node.in_(nodes), holds.c.clean.is_(False)))

    async def holds(self, chain: str) -> list[AuditHold]:
        """Return which servers wrote to a chain."""
        return await self._tuples(select(holds).where(holds.c.chain == chain).order_by(holds.c.node))

    async def unfinished(self, chain: str, start: int) -> list[AuditStored]:
        """Return the begin records from `start` on that have no end record."""
        ends = records.alias("ends")
        ended = select(ends.c.seq).where(ends.c.chain == records.c.chain, ends.c.ref == records.c.seq).exists()
        query = _STORED.where(records.c.chain == chain, records.c.seq >= start, records.c.type == "begin", ~ended)
        return await self._stored(query.order_by(records.c.seq))

    async def records(self, chain: str, *, after: int = 0, until: int, limit: int) -> list[AuditStored]:
        """Return records of a chain above `after` and up to `until`, in order."""
        query = _STORED.where(records.c.chain == chain, records.c.seq > after, records.c.seq <= until)
        return await self._stored(query.order_by(records.c.seq).limit(limit))

    async def heads(self, chain: str, *, after: int = 0, limit: int = 1000) -> list[AuditHead]:
        """Return heads of a chain above `after`, in order."""
        query = select(heads).where(heads.c.chain == chain, heads.c.seq > after)
        return await self._tuples(query.order_by(heads.c.seq).limit(limit))

    async def head_before(self, chain: str, at: float) -> AuditHead | None:
        """Return the newest head of a chain that was signed at `at` or before."""
        query = select(heads).where(heads.c.chain == chain, heads.c.at <= at)
        found = await self._tuples(query.order_by(heads.c.seq.desc()).limit(1))
        return found[0] if found else None

    async def aged(self, at: float, *, after: str = "", limit: int = 1000) -> list[str]:
        """Return the sorted names of chains with records covered by a head signed at `at` or before."""
        covered = select(records.c.seq).where(records.c.chain == heads.c.chain, records.c.seq <= heads.c.seq).exists()
        query = select(heads.c.chain).where(heads.c.at <= at, heads.c.chain > after, covered)
        return await self._database.scalars(query.distinct().order_by(heads.c.chain).limit(limit))

    async def prune(self, chain: str, seq: int, *, whole: bool) -> int:
        """Remove the records of a chain up to its head `seq`, and the heads before it; return the number of records.

        With `whole` the entire chain is removed when nothing came after the head.
        """

        def run(connection: Connection) -> int:
            old = delete(records).where(records.c.chain == chain, records.c.seq <= seq)
            count = connection.execute(old).rowcount
            connection.execute(delete(heads).where(heads.c.chain == chain, heads.c.seq < seq))
            if whole and _tip(connection, chain)[0] == seq:
                connection.execute(delete(heads).where(heads.c.chain == chain))
                connection.execute(delete(holds).where(holds.c.chain == chain))
            return count

        return await self._database.write(run)

    async def _stored(self, query: Select[Any]) -> list[AuditStored]:
        return [(seq, bytes(hashed), body) for seq, hashed, body in await self._database.rows(query)]

    async def _tuples(self, query: Select[Any]) -> list[Any]:
        return [tuple(row) for row in await self._database.rows(query)]


def _grown() -> Conflict:
    return Conflict("another server has continued the chain", field="seq", hint="read its new end and append there")


def _insert(connection: Connection, rows: Sequence[AuditRow]) -> None:
    """Insert records. Every operation waits for this, and sqlite3 alone takes a third of SQLAlchemy's time."""
    driver = connection.connection.driver_connection
    if isinstance(driver, sqlite3.Connection):
        try:
            driver.executemany(_INSERT, rows)
        except sqlite3.IntegrityError:
            raise _grown() from None
    else:
        connection.execute(insert(records), [dict(zip(_RECORD, row, strict=True)) for row in rows])


def _tip(connection: Connection, chain: str) -> AuditTip:
    last = select(records.c.seq, records.c.hash).where(records.c.chain == chain)
    row = connection.execute(last.order_by(records.c.seq.desc()).limit(1)).one_or_none()
    newest = select(heads.c.seq, heads.c.hash).where(heads.c.chain == chain)
    head = connection.execute(newest.order_by(heads.c.seq.desc()).limit(1)).one_or_none()
    head_seq = 0 if head is None else head.seq
    if row is not None:
        return row.seq, bytes(row.hash), head_seq
    return head_seq, b"" if head is None else bytes.fromhex(head.hash), head_seq


def _upsert(connection: Connection) -> Insert:
    # Only the module of the dialect in use: PostgreSQL's takes long to import.
    dialect = import_module(f"sqlalchemy.dialects.{connection.dialect.name}")
    statement = dialect.insert(holds)
    new = statement.excluded
    upsert: Insert = statement.on_conflict_do_update(
        index_elements=["chain", "node"], set_={"open_from": new.open_from, "clean": new.clean}
    )
    return upsert
