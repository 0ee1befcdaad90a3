"""The queries on audit records, signed heads, and which server writes to which chain. `audit_search` has the search.

Knows no hashes or keys: the caller links and signs records. `batches` writes them.
Arguments and results are plain tuples in the order of the tables' columns.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import ColumnElement, Select, bindparam, delete, select
from sqlalchemy.engine import Connection

from carrel.store.audit_search import AuditSearch
from carrel.store.batches import AuditHead, AuditHold, Batch, BatchWriter
from carrel.store.database import Database
from carrel.store.tables import audit_heads as heads
from carrel.store.tables import audit_holds as holds
from carrel.store.tables import audit_records as records

AuditTip = tuple[int, bytes, int]
"""seq and hash of the last record, seq of the newest head; 0 and no hash where there are none"""
AuditStored = tuple[int, bytes, str]
"""seq, hash, body"""

_STORED = select(records.c.seq, records.c.hash, records.c.body)


class AuditStore(AuditSearch):
    """Reads and writes audit records. No method changes one; only `prune` removes some, from a chain's start."""

    def __init__(self, database: Database, writer: BatchWriter):
        super().__init__(database)
        self._writer = writer

    async def append(self, batch: Batch) -> None:
        """Add a batch; see `BatchWriter.write`."""
        await self._writer.write(batch)

    async def has(self, batch: Batch) -> bool:
        """Whether a batch was written whose answer was lost. One that only says how chains were left may be written
        twice, so it counts as not written.
        """
        new, signed, _, _ = batch
        if new:
            chain, seq, *_, hashed, _ = new[-1]
            query = select(records.c.hash).where(records.c.chain == chain, records.c.seq == seq)
            return [bytes(found) for found in await self._database.scalars(query)] == [hashed]
        if signed:
            chain, seq, end, *_ = signed[-1]
            query = select(heads.c.hash).where(heads.c.chain == chain, heads.c.seq == seq)
            return await self._database.scalars(query) == [end]
        return False

    async def tip(self, chain: str) -> AuditTip:
        """Return the end of a chain."""
        return (await self.tips([chain]))[chain]

    async def tips(self, chains: Collection[str]) -> dict[str, AuditTip]:
        """Return the ends of chains, each as it is at one moment."""
        return await self._database.read(lambda connection: {chain: _tip(connection, chain) for chain in chains})

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


def _newest(column: ColumnElement[Any], seq: ColumnElement[Any], chain: ColumnElement[Any]) -> Any:
    return select(column).where(chain == bindparam("chain")).order_by(seq.desc()).limit(1).scalar_subquery()


# One statement: it sees one moment.
_TIP = select(
    _newest(records.c.seq, records.c.seq, records.c.chain),
    _newest(records.c.hash, records.c.seq, records.c.chain),
    _newest(heads.c.seq, heads.c.seq, heads.c.chain),
    _newest(heads.c.hash, heads.c.seq, heads.c.chain),
)


def _tip(connection: Connection, chain: str) -> AuditTip:
    seq, hashed, head_seq, head_hash = connection.execute(_TIP, {"chain": chain}).one()
    if seq is not None:
        return seq, bytes(hashed), head_seq or 0
    return head_seq or 0, b"" if head_hash is None else bytes.fromhex(head_hash), head_seq or 0
