"""Checkpoints of graphs in a SQLite file, or in PostgreSQL for processes on several machines.

The savers are LangGraph's own. This module adds safe creation of the tables by several processes, and thread locks.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiosqlite
import psycopg
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from psycopg.rows import DictRow, dict_row
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from carrel.errors import InvalidRequest, PlatformError
from carrel.integrations.langgraph.locks import FileLocks, Locks, PostgresLocks, held
from carrel.integrations.langgraph.sqlite import InlineConnection

BUSY_S = 30.0
CONNECT_S = 10.0
MOST_CONNECTIONS = 8
_SETUP = "carrel: make the tables"


@dataclass(frozen=True)
class Checkpoints:
    """An open database of checkpoints."""

    saver: BaseCheckpointSaver[Any]
    locks: Locks

    def running(self, thread_id: str, *, wait_s: float = 0.0) -> AbstractAsyncContextManager[None]:
        """Hold the lock of a thread while running it. Raises `ThreadBusy` if another still holds it after `wait_s`.

        The lock ends with its process, so another process can continue a thread at once when its process was killed.
        """
        return held(self.locks, f"thread {thread_id}", wait_s)


@asynccontextmanager
async def open_checkpointer(database: str | Path) -> AsyncIterator[Checkpoints]:
    """Open the checkpoints at a path, a `sqlite:///` URL or a `postgresql://` URL. Creates missing tables.

    async with open_checkpointer("checkpoints.db") as checkpoints:
        graph = build_graph("openai:gpt-5.5", checkpointer=checkpoints.saver)
    """
    where = os.fspath(database)
    scheme, separator, rest = where.partition("://")
    if separator and scheme in {"postgresql", "postgres"}:
        opening = _postgres(where)
    elif not separator or scheme == "sqlite":
        opening = _sqlite(rest.removeprefix("/") if separator else where)
    else:
        raise InvalidRequest(
            f"checkpoints cannot be kept in '{scheme}'", field="database", hint="give a path, or a postgresql:// URL"
        )
    async with opening as checkpoints:
        yield checkpoints


@asynccontextmanager
async def _sqlite(path: str) -> AsyncIterator[Checkpoints]:
    if not path:
        raise InvalidRequest("the database has no path", field="database", hint="write sqlite:////path/to/file")
    locks = FileLocks(f"{path}.locks")
    try:
        _private(path)
        connection = await InlineConnection(path, BUSY_S, lookups=True)
    except (OSError, aiosqlite.Error) as error:
        raise _unusable(path, error) from error
    try:
        saver = AsyncSqliteSaver(connection)
        try:
            async with held(locks, _SETUP, BUSY_S):
                await saver.setup()
            # A killed process loses nothing; only a power failure may lose the last steps.
            await connection.execute("PRAGMA synchronous=NORMAL")
        except (OSError, aiosqlite.Error) as error:
            raise _unusable(path, error) from error
        yield Checkpoints(saver, locks)
    finally:
        await connection.close()


def _unusable(path: str, error: Exception) -> PlatformError:
    return PlatformError(
        f"the checkpoints in {path} cannot be used: {error}", field="database", hint="name another file"
    )


def _private(path: str) -> None:
    """Create the file, readable only by its owner: it contains conversations."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


@asynccontextmanager
async def _postgres(url: str) -> AsyncIterator[Checkpoints]:
    pool: AsyncConnectionPool[psycopg.AsyncConnection[DictRow]] = AsyncConnectionPool(
        url,
        min_size=1,
        max_size=MOST_CONNECTIONS,
        open=False,
        timeout=CONNECT_S,
        kwargs={"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row, "connect_timeout": int(CONNECT_S)},
    )
    locks = PostgresLocks(url)
    watching = asyncio.create_task(locks.watch())
    try:
        await _made(pool, locks)
        yield Checkpoints(AsyncPostgresSaver(pool), locks)
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        await locks.close()
        await pool.close()


async def _made(pool: AsyncConnectionPool[psycopg.AsyncConnection[DictRow]], locks: PostgresLocks) -> None:
    """Open the pool and create the tables, one process at a time."""
    try:
        # Waiting for the lock inside the database would keep its own indexes from being built.
        async with held(locks, _SETUP, BUSY_S):
            await pool.open(wait=True, timeout=CONNECT_S)
            await AsyncPostgresSaver(pool).setup()
    except (psycopg.Error, PoolTimeout) as error:
        raise PlatformError(
            "the database of the checkpoints cannot be used",
            field="database",
            hint="check that it runs and that its user may create tables",
        ) from error
