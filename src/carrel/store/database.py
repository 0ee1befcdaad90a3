"""Opens the database and runs queries on it. Knows how SQLite and PostgreSQL want to be set up, and nothing of what is
stored.

A query is a plain function of a connection, so there is one set of them. SQLite runs it in a thread of its own (one hop
a call, where an asyncio driver makes one a statement); PostgreSQL has its own module, imported when it is used.
"""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from sqlalchemy import Executable, Select, create_engine, event
from sqlalchemy.engine import URL, Connection, Engine, RowMapping
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry, StaticPool

from carrel.config import DATABASES
from carrel.errors import InvalidRequest, PlatformError
from carrel.store.schema import migrate

T = TypeVar("T")
Query = Callable[[Connection], T]

# WAL lets readers and the writer work side by side; NORMAL loses at most the last commits at a power cut,
# never the file. The timeout comes first, because even turning on WAL may have to wait.
_PRAGMAS = (
    "PRAGMA busy_timeout=5000",
    "PRAGMA journal_mode=WAL",
    "PRAGMA synchronous=NORMAL",
    "PRAGMA foreign_keys=ON",
)


_IN_A_ROW = 100
"""After so many writes here one goes to the writer's thread, so that the log of changes is emptied now and then."""


class _Cursor(Protocol):
    def execute(self, statement: str, /) -> object: ...
    def close(self) -> None: ...


def _prepare(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    connection.isolation_level = None  # the driver would begin transactions too late; `_begin` does it
    cursor: _Cursor = connection.cursor()
    for pragma in _PRAGMAS:
        cursor.execute(pragma)
    cursor.close()


def _never_wait(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    """Neither for another writer, nor for the disk: the writer's thread brings what was written into the file."""
    cursor: _Cursor = connection.cursor()
    cursor.execute("PRAGMA busy_timeout=0")
    cursor.execute("PRAGMA wal_autocheckpoint=0")
    cursor.close()


def _begin(connection: Connection) -> None:
    # A writer takes its lock at once: one that reads first could find later that it may not write any more.
    # A reader is one statement, which needs no transaction.
    if connection.get_execution_options().get("carrel_writes", False):
        cursor: _Cursor = connection.connection.cursor()
        cursor.execute("BEGIN IMMEDIATE")
        cursor.close()


class Occupied(Exception):
    """Nothing can be written right here and now; `write` waits until it can."""


class _Runner(Protocol):
    failures: tuple[type[Exception], ...]
    """What the driver raises when the database cannot be used, besides what the toolkit makes of it."""

    async def read(self, query: Query[T]) -> T: ...
    async def write(self, query: Query[T]) -> T: ...
    def write_here(self, query: Query[T]) -> T: ...
    async def sync(self) -> None: ...
    async def close(self) -> None: ...


class _Sqlite:
    """One thread that writes and one that reads, so that a reader never queues behind a waiting writer.

    What is short is written here, in the thread of the caller, while nobody else writes: it goes to the page cache in a
    fraction of the time that the way to another thread and back takes.
    """

    failures: tuple[type[Exception], ...] = (sqlite3.Error,)

    def __init__(self, path: str):
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        self._path = path
        url = URL.create("sqlite", database=path)
        self._engine = create_engine(url, pool_size=2, max_overflow=0, hide_parameters=True)
        self._here = create_engine(
            url, poolclass=StaticPool, connect_args={"check_same_thread": False}, hide_parameters=True
        )
        for engine in (self._engine, self._here):
            event.listen(engine, "connect", _prepare)
            event.listen(engine, "begin", _begin)
        event.listen(self._here, "connect", _never_wait)
        self._writing = self._engine.execution_options(carrel_writes=True)
        self._connection: Connection | None = None
        self._until_thread = _IN_A_ROW
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="carrel-store-writer")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="carrel-store-reader")

    async def read(self, query: Query[T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._reader, _run, self._engine, query)

    async def write(self, query: Query[T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writer, _run, self._writing, query)

    def write_here(self, query: Query[T]) -> T:
        if self._until_thread == 0:
            self._until_thread = _IN_A_ROW
            raise Occupied
        if self._connection is None:
            self._connection = self._here.connect().execution_options(carrel_writes=True)
        try:
            transaction = self._connection.begin()
        except (sqlite3.OperationalError, OperationalError):
            self._let_go()
            raise Occupied from None
        try:
            with transaction:
                self._until_thread -= 1
                return query(self._connection)
        except BaseException:
            self._let_go()
            raise

    def _let_go(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def sync(self) -> None:
        for path in (self._path, f"{self._path}-wal", os.path.dirname(self._path) or "."):
            with suppress(FileNotFoundError):  # the log of changes, when all of it is in the file
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    await asyncio.to_thread(os.fsync, fd)
                finally:
                    os.close(fd)

    async def close(self) -> None:
        for executor in (self._writer, self._reader):
            await asyncio.to_thread(executor.shutdown)
        self._let_go()
        self._here.dispose()
        self._engine.dispose()


def _run(engine: Engine, query: Query[T]) -> T:
    with engine.begin() as connection:
        return query(connection)


class Database:
    """Runs queries: `read` and `write` take a function of a connection, each call is one transaction."""

    def __init__(self, runner: _Runner, name: str, field: str):
        self._runner = runner
        self._name = name
        self._field = field

    @classmethod
    async def open(cls, where: str) -> Database:
        """Open the SQLite file or the `postgresql://` URL, making or migrating the tables.

        `InvalidRequest` for a URL that is not one, `PlatformError` when the database cannot be used or is newer
        than this code. No error shows a password.
        """
        scheme, separator, rest = where.partition("://")
        if not separator or scheme == "sqlite":
            path = rest.removeprefix("/") if separator else where
            if not path:
                raise InvalidRequest("the URL names no file", field="database", hint="write sqlite:////path/to/file")
            return await cls._opened(lambda: _Sqlite(path), f"the database {path}", "data_dir")
        host = _checked(where, scheme)
        from carrel.store.postgres import Postgres

        return await cls._opened(lambda: Postgres(where), f"the PostgreSQL database on {host}", "database")

    @classmethod
    async def _opened(cls, make: Callable[[], _Runner], name: str, field: str) -> Database:
        with _words(name, field):
            database = cls(make(), name, field)
        try:
            await database.write(migrate)
        except BaseException:
            await database.close()
            raise
        return database

    async def read(self, query: Query[T]) -> T:
        """Run a query that changes nothing and is one statement."""
        with _words(self._name, self._field, self._runner.failures):
            return await self._runner.read(query)

    async def write(self, query: Query[T]) -> T:
        """Run a query in a transaction: all of it is written, or nothing.

        An `IntegrityError` comes through, as only the caller knows which rule was broken.
        """
        with _words(self._name, self._field, self._runner.failures):
            return await self._runner.write(query)

    async def execute(self, statement: Executable) -> int:
        """Run one statement that changes rows; how many it changed. Raises what `write` raises."""
        return await self.write(lambda connection: connection.execute(statement).rowcount)

    async def all(self, query: Select[Any], make: Callable[[RowMapping], T]) -> list[T]:
        """What `make` makes of each row that a query finds."""
        return await self.read(lambda connection: [make(row) for row in connection.execute(query).mappings()])

    def write_here(self, query: Query[T]) -> T:
        """`write` for a short query, now and without waiting for anything. Raises `Occupied` when that cannot be."""
        with _words(self._name, self._field, self._runner.failures):
            return self._runner.write_here(query)

    async def sync(self) -> None:
        """Return when what was written outlasts a power cut."""
        with _words(self._name, self._field):
            await self._runner.sync()

    async def close(self) -> None:
        """Finish what runs and close every connection."""
        await self._runner.close()


def _checked(url: str, scheme: str) -> str:
    """The host of a URL that can be used, for words to show. What is wrong is never quoted: it may be a password."""
    if scheme not in DATABASES:
        raise InvalidRequest(
            f"a database of the kind '{scheme[:20]}' is not known"
            if re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme)
            else "the database is no URL",
            field="database",
            hint="use postgresql://user:password@host:port/name, or sqlite:////path/to/file",
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise InvalidRequest(
            "the host or the port of the database URL cannot be read",
            field="database",
            hint="a password with special characters has to be percent-encoded",
        ) from None
    return f"{parts.hostname or 'a local socket'}{f':{port}' if port else ''}"


@contextmanager
def _words(name: str, field: str, failures: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn what drivers raise into one error that says which database failed."""
    known: tuple[type[Exception], ...] = (SQLAlchemyError, OSError, *failures)
    try:
        yield
    except IntegrityError:
        raise
    except known as error:
        said = getattr(error, "orig", None) or error
        raise PlatformError(
            f"{name} cannot be used: {str(said) or type(said).__name__}",
            field=field,
            hint="check its mode and free space; a damaged file has to be moved away"
            if field == "data_dir"
            else "check that it runs, and the host, user and password of the setting `database`",
        ) from None
