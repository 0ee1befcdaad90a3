"""Runs queries on PostgreSQL, on the event loop through asyncpg. Imported only when a URL names a PostgreSQL server."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import asyncpg
from sqlalchemy import event
from sqlalchemy.engine import Connection
from sqlalchemy.engine.interfaces import AdaptedConnection
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry, PoolProxiedConnection

from carrel.store.database import Occupied, note_table
from carrel.store.tables import declare_for_postgresql

T = TypeVar("T")

_CONNECT_S = 10
_STATEMENT_S = 60
# A server whose machine is lost in the middle of a transaction must not hold its locks for long: PostgreSQL would wait
# for it for two hours.
_LOST = (
    "SET idle_in_transaction_session_timeout = '15s'; SET tcp_keepalives_idle = 5; SET tcp_keepalives_interval = 5; "
    "SET tcp_keepalives_count = 3; SET tcp_user_timeout = '20s'"
)


def _alive(connection: AdaptedConnection, _: ConnectionPoolEntry, __: PoolProxiedConnection) -> None:
    # The driver knows when the server has closed the connection; a ping would cost three round trips per query.
    if connection.driver_connection.is_closed():
        raise DisconnectionError


class Postgres:
    """A pool of connections. Reads are single statements and need no transaction around them."""

    failures: tuple[type[Exception], ...] = (asyncpg.PostgresError, asyncpg.InterfaceError)

    def __init__(self, url: str, *, notes: bool = False):
        declare_for_postgresql()

        async def connect() -> object:
            # The driver parses the URL itself, so every libpq parameter it supports (sslmode, host, ...) works.
            connection = await asyncpg.connect(url, timeout=_CONNECT_S, command_timeout=_STATEMENT_S)
            try:
                await connection.execute(_LOST)
            except BaseException:
                connection.terminate()
                raise
            return connection

        self._engine: AsyncEngine = create_async_engine(
            "postgresql+asyncpg://", async_creator=connect, pool_size=8, max_overflow=0, hide_parameters=True
        )
        event.listen(self._engine.sync_engine, "checkout", _alive)
        if notes:
            event.listen(self._engine.sync_engine, "after_cursor_execute", note_table)
        self._reading = self._engine.execution_options(isolation_level="AUTOCOMMIT")

    async def read(self, query: Callable[[Connection], T]) -> T:
        """Run a query that is one statement."""
        async with self._reading.connect() as connection:
            return await connection.run_sync(query)

    async def write(self, query: Callable[[Connection], T]) -> T:
        """Run a query in a transaction."""
        async with self._engine.begin() as connection:
            return await connection.run_sync(query)

    def write_here(self, query: Callable[[Connection], T]) -> T:
        """Raise `Occupied`: a write always waits for the server."""
        raise Occupied

    async def sync(self) -> None:
        """Do nothing: the server syncs at each commit."""

    async def close(self) -> None:
        """Close every connection."""
        await self._engine.dispose()
