"""Opens the database and its tables. Knows how SQLite wants to be set up, and nothing of what is stored."""

from __future__ import annotations

import os
from typing import Protocol

from sqlalchemy import event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from carrel.errors import PlatformError
from carrel.store.tables import metadata

# WAL lets readers and the writer work side by side; NORMAL loses at most the last commits at a power cut,
# never the file.
_PRAGMAS = (
    "PRAGMA journal_mode=WAL",
    "PRAGMA synchronous=NORMAL",
    "PRAGMA busy_timeout=5000",
    "PRAGMA foreign_keys=ON",
)


class _Cursor(Protocol):
    def execute(self, statement: str, /) -> object: ...
    def close(self) -> None: ...


def _prepare(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    cursor: _Cursor = connection.cursor()
    for pragma in _PRAGMAS:
        cursor.execute(pragma)
    cursor.close()


class Database:
    """The engine all queries share."""

    def __init__(self, engine: AsyncEngine):
        self.engine = engine

    @classmethod
    async def open(cls, path: str) -> Database:
        """Open the SQLite file at `path`, making it and its tables where they are missing."""
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        engine = create_async_engine(f"sqlite+aiosqlite:///{path}", pool_size=4, max_overflow=4)
        event.listen(engine.sync_engine, "connect", _prepare)
        try:
            async with engine.begin() as connection:
                await connection.run_sync(metadata.create_all)
        except SQLAlchemyError as error:
            await engine.dispose()
            raise PlatformError(
                f"the database {path} cannot be used: {getattr(error, 'orig', None) or error}",
                field="data_dir",
                hint="check its mode and free space; a damaged file has to be moved away",
            ) from None
        return cls(engine)

    async def close(self) -> None:
        """Close every connection."""
        await self.engine.dispose()
