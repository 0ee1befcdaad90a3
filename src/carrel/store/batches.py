"""Writes batches of the audit log: records with their events, in one transaction or not at all.

A server of one process writes its batches itself. The workers of a server send theirs to one process, which writes
those of all of them in common transactions: `batch_writer`. Knows no hashes or keys.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from importlib import import_module
from typing import Protocol

from sqlalchemy import Insert, insert
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from carrel.errors import Conflict
from carrel.models.events import EventDraft
from carrel.store.database import Database
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

FEW = 8
"""The most rows of a batch that is written on the event loop, where the database can do that."""
_RECORD = tuple(column.name for column in records.columns if column.name != "id")
_HEAD = tuple(column.name for column in heads.columns)
_HOLD = tuple(column.name for column in holds.columns)
_INSERT = f"INSERT INTO {records.name} ({', '.join(_RECORD)}) VALUES ({', '.join('?' * len(_RECORD))})"  # noqa: S608


Batch = tuple[Sequence[AuditRow], Sequence[AuditHead], Sequence[AuditHold], Sequence[EventDraft]]
"""What is written together."""


class BatchWriter(Protocol):
    """Whatever writes batches."""

    async def write(self, batch: Batch) -> None:
        """Write a batch, and return when it is committed. `Conflict` when a chain has grown meanwhile: no two records
        have the same position in a chain. With any other error nobody may know whether it was written.
        """


class BatchesHere:
    """Writes in this process."""

    def __init__(self, database: Database):
        self._database = database

    async def write(self, batch: Batch) -> None:
        """Write a batch; see `BatchWriter`."""

        def run(connection: Connection) -> None:
            add(connection, batch)
            stage(connection, batch[3])

        try:
            await (self._database.write_soon(run) if is_short(batch) else self._database.write(run))
        except IntegrityError:
            raise grown() from None

    def close(self) -> None:
        """Do nothing: the database is closed by who opened it."""


def add(connection: Connection, batch: Batch) -> None:
    """Add a batch, without its events, in the transaction of a connection."""
    new, signed, held, _ = batch
    if new:
        _insert(connection, new)
    if signed:
        connection.execute(insert(heads), [dict(zip(_HEAD, head, strict=True)) for head in signed])
    if held:
        connection.execute(_upsert(connection), [dict(zip(_HOLD, hold, strict=True)) for hold in held])


def is_short(batch: Batch) -> bool:
    """Whether a batch is written in less time than a hop to another thread takes."""
    new, signed, held, _ = batch
    return len(new) <= FEW and not signed and len(held) <= 1


def grown() -> Conflict:
    """Return the error of a batch whose place is taken."""
    return Conflict("another server has continued the chain", field="seq", hint="read its new end and append there")


def _insert(connection: Connection, rows: Sequence[AuditRow]) -> None:
    """Insert records. Every operation waits for this, and sqlite3 alone takes a third of SQLAlchemy's time."""
    driver = connection.connection.driver_connection
    if isinstance(driver, sqlite3.Connection):
        try:
            driver.executemany(_INSERT, rows)
        except sqlite3.IntegrityError:
            raise grown() from None
    else:
        connection.execute(insert(records), [dict(zip(_RECORD, row, strict=True)) for row in rows])


def _upsert(connection: Connection) -> Insert:
    # Only the module of the dialect in use: PostgreSQL's takes long to import.
    dialect = import_module(f"sqlalchemy.dialects.{connection.dialect.name}")
    statement = dialect.insert(holds)
    new = statement.excluded
    upsert: Insert = statement.on_conflict_do_update(
        index_elements=["chain", "node"], set_={"open_from": new.open_from, "clean": new.clean}
    )
    return upsert
