"""The queries on public ports: those that everybody may reach. Knows no operator's setting."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import ColumnElement, and_, delete, func, insert, select
from sqlalchemy.engine import Connection

from carrel.errors import LimitExceeded
from carrel.store.database import Database
from carrel.store.tables import public_ports

MOST = 100
_table = public_ports.c


class PublicPort(NamedTuple):
    """A row of the table of public ports."""

    session_id: str
    port: int
    token_id: str | None
    wake: bool
    at: float


class PublicPortStore:
    """Reads and writes public ports."""

    def __init__(self, database: Database):
        self._database = database

    async def get(self, session_id: str, port: int) -> PublicPort | None:
        """Return a public port; None if it is private."""
        query = select(public_ports).where(_is(session_id, port))
        return await self._database.first(query, lambda row: PublicPort(**row))

    async def put(self, record: PublicPort) -> None:
        """Make a port public, or change how; `LimitExceeded` if the session has too many."""

        def write(connection: Connection) -> None:
            connection.execute(delete(public_ports).where(_is(record.session_id, record.port)))
            query = select(func.count()).select_from(public_ports).where(_table.session_id == record.session_id)
            if (connection.scalar(query) or 0) >= MOST:
                raise LimitExceeded(f"a sandbox has at most {MOST} public ports", field="port", hint="close some first")
            connection.execute(insert(public_ports).values(**record._asdict()))

        await self._database.write(write)

    async def remove(self, session_id: str, port: int) -> None:
        """Make a port private. May be repeated."""
        await self._database.execute(delete(public_ports).where(_is(session_id, port)))


def _is(session_id: str, port: int) -> ColumnElement[bool]:
    return and_(_table.session_id == session_id, _table.port == port)
