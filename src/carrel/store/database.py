"""Opens the database and runs queries on it. Knows how SQLite and PostgreSQL are set up, and nothing about the tables.

A query is a plain function of a connection, so the same queries serve both databases. SQLite runs each query in a
thread (one hop per call; an asyncio driver makes one per statement). PostgreSQL has its own module, imported on demand.
"""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from sqlalchemy import Executable, Select, create_engine, event
from sqlalchemy.engine import URL, Connection, Engine, RowMapping
from sqlalchemy.exc import DataError, IntegrityError, OperationalError, ProgrammingError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry, StaticPool

from carrel.config import DATABASES
from carrel.errors import DatabaseUnavailable, InvalidRequest, PlatformError
from carrel.primitives.process_locks import FileLock, open_lock_file
from carrel.store.schema import migrate

T = TypeVar("T")
Query = Callable[[Connection], T]

# WAL lets readers and the writer work at the same time; with NORMAL a power cut loses at most the last commits, never
# the file.
_PRAGMAS = (
    "PRAGMA busy_timeout=5000",
    "PRAGMA synchronous=NORMAL",
    "PRAGMA foreign_keys=ON",
)
_SWITCH_S = 5.0
RETRY_S = 1
"""After how many seconds a caller asks again when the database did not answer."""
_STAGED = "carrel_staged"
_CHANGED = "carrel_changed"
_CHECKPOINT_WRITES = 500
"""After this many writes of all processes that take turns, about, one of them checkpoints the WAL."""
_WRITER_CHECKPOINT_WRITES = 500
"""The same of the process that writes the records of all workers: its writes on the event loop, between which one goes
to the thread that empties the log.
"""
_AHEAD = 100
"""So many writes before that, what the log has by then is written to the disk."""
_TRIES, _TRY_S = 2, 0.00005
"""How often a short write tries to get its turn before the event loop goes on, and the pause between: turns take some
tenths of a millisecond.
"""
_TURNS, _TURN_S = 10, 0.001
"""How often it comes back for its turn, and after which time, before the writer's thread waits for it. That thread
would keep its turn while it waits for the interpreter, which the event loop may have for milliseconds.
"""
_CACHE_KIB = 16_384
"""The end of each index of the audit log, which every record changes, stays in memory."""
_MOST_WRITES_HERE = 100
"""After this many writes on the event loop, one goes to the writer's thread, which also checkpoints the WAL."""


def _prepare(connection: sqlite3.Connection, _: ConnectionPoolEntry) -> None:
    connection.isolation_level = None  # the driver would begin transactions too late; `_begin` does it
    for pragma in _PRAGMAS:
        connection.execute(pragma)
    deadline = time.monotonic() + _SWITCH_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError:  # another process switches now: SQLite does not wait for that by itself
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _never_checkpoint(connection: sqlite3.Connection, _: ConnectionPoolEntry) -> None:
    connection.execute("PRAGMA wal_autocheckpoint=0")


def note_table(
    connection: Connection, cursor: sqlite3.Cursor, _statement: str, _values: object, context: Any, _many: bool
) -> None:
    """Remember the table that a statement changed: `Database` reports it once the transaction is committed."""
    if (context.isinsert or context.isupdate or context.isdelete) and cursor.rowcount:
        connection.info.setdefault(_CHANGED, set()).add(context.compiled.statement.table.name)


def _never_wait(connection: sqlite3.Connection, _: ConnectionPoolEntry) -> None:
    """Let this connection wait neither for another writer nor for a checkpoint, which the writer's thread makes."""
    connection.execute("PRAGMA busy_timeout=0")
    connection.execute("PRAGMA wal_autocheckpoint=0")
    connection.execute(f"PRAGMA cache_size={-_CACHE_KIB}")


def _begin(connection: Connection) -> None:
    # A write transaction takes the lock at once: if it read first, it could fail later because another one wrote.
    # A read is one statement, which needs no transaction.
    if connection.get_execution_options().get("carrel_writes", False):
        connection.exec_driver_sql("BEGIN IMMEDIATE")


class Occupied(Exception):
    """The database cannot be written without waiting; `write` waits."""


class OthersTurn(Occupied):
    """Another process writes, for less than a millisecond."""


class _StatementRunner(Protocol):
    failures: tuple[type[Exception], ...]
    """Exceptions of the driver that SQLAlchemy does not wrap, raised when the database cannot be used."""

    async def read(self, query: Query[T]) -> T: ...
    async def write(self, query: Query[T]) -> T: ...
    def write_here(self, query: Query[T]) -> T: ...
    async def sync(self) -> None: ...
    async def close(self) -> None: ...


class _Sqlite:
    """One thread writes and one reads, so that a read never queues behind a write that waits for the lock.

    A third connection serves `write_here`: short writes in the caller's thread, which cost less than a hop to another
    thread (docs/decisions/0018-short-writes-on-the-event-loop.md). It begins and commits by the driver: SQLAlchemy
    would take as long for that as SQLite for a record.
    """

    failures: tuple[type[Exception], ...] = (sqlite3.Error,)

    def __init__(self, path: str, turns: Workers | None):
        """With `turns`, processes take turns to write: SQLite alone would let them sleep and try again, for longer and
        longer.
        """
        self._turns = [] if turns is None else [open_lock_file(turns.turns), open_lock_file(turns.turns)]
        turn: list[FileLock | None] = [FileLock(each) for each in self._turns] or [None, None]
        self._turn, self._turn_here = turn
        self._patient = turns is not None and turns.writer
        self._writes = 0
        self._most_writes = 0
        if turns is not None:
            self._most_writes = 0 if turns.writer else _CHECKPOINT_WRITES * turns.count
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
            if turns is not None:
                event.listen(engine, "after_cursor_execute", note_table)
        event.listen(self._here, "connect", _never_wait)
        if self._turn is not None:
            event.listen(self._engine, "connect", _never_checkpoint)
        self._writing = self._engine.execution_options(carrel_writes=True)
        self._connection: Connection | None = None
        self._most_writes_here = _WRITER_CHECKPOINT_WRITES if self._patient else _MOST_WRITES_HERE
        self._writes_left = self._most_writes_here
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="carrel-store-writer")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="carrel-store-reader")

    async def read(self, query: Query[T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._reader, _run, self._engine, query)

    async def write(self, query: Query[T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writer, self._write, query)

    def _write(self, query: Query[T]) -> T:
        if self._turn is None:
            return _run(self._writing, query)
        with self._turn.held():
            result = _run(self._writing, query)
        self._writes += 1
        if self._writes >= self._most_writes:  # not in the turn: the other processes need not wait for the disk
            self._writes = 0
            self._checkpoint()
        return result

    def _checkpoint(self) -> None:
        _run(self._engine, lambda connection: connection.exec_driver_sql("PRAGMA wal_checkpoint(PASSIVE)").close())

    def write_here(self, query: Query[T]) -> T:
        if self._writes_left == 0:
            self._writes_left = self._most_writes_here
            raise Occupied
        if self._patient and self._writes_left == _AHEAD:
            # While this is written to the disk, others go on; so what is left for the thread that empties the log, for
            # which all wait, is little.
            self._reader.submit(self._checkpoint)
        if self._turn_here is None:
            return self._write_here(query)
        for _ in range(_TRIES):
            if self._turn_here.take(wait=self._patient):
                break
            time.sleep(_TRY_S)
        else:
            raise OthersTurn
        try:
            self._writes += 1
            return self._write_here(query)
        finally:
            self._turn_here.release()

    def _write_here(self, query: Query[T]) -> T:
        try:
            if self._connection is None:
                self._connection = self._here.connect()
            driver = self._connection.connection.driver_connection
            assert isinstance(driver, sqlite3.Connection)
            driver.execute("BEGIN IMMEDIATE")
        except (sqlite3.OperationalError, OperationalError):
            self._disconnect_here()
            raise Occupied from None
        try:
            self._writes_left -= 1
            result = query(self._connection)
            self._connection.commit()  # of SQLAlchemy: does nothing if only the driver was used
            driver.commit()
        except BaseException:
            self._disconnect_here()
            raise
        return result

    def _disconnect_here(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def sync(self) -> None:
        for path in (self._path, f"{self._path}-wal", os.path.dirname(self._path) or "."):
            with suppress(FileNotFoundError):  # the WAL, after a full checkpoint
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    await asyncio.to_thread(os.fsync, fd)
                finally:
                    os.close(fd)

    async def close(self) -> None:
        for executor in (self._writer, self._reader):
            await asyncio.to_thread(executor.shutdown)
        self._disconnect_here()
        self._here.dispose()
        self._engine.dispose()
        for each in self._turns:
            os.close(each)


def _run(engine: Engine, query: Query[T]) -> T:
    with engine.begin() as connection:
        return query(connection)


def mark_staged(connection: Connection) -> None:
    """Let `Database.staged` be set when this transaction is committed."""
    connection.info[_STAGED] = True


def _noting(query: Query[T], connection: Connection) -> tuple[T, bool, Collection[str]]:
    connection.info.pop(_CHANGED, None)  # of a transaction that failed
    return query(connection), connection.info.pop(_STAGED, False), connection.info.pop(_CHANGED, ())


@dataclass(frozen=True, slots=True)
class Workers:
    """The `count` processes of a server. `turns` is the path of a file in which those that write take turns; `wrote` is
    called with the tables that a committed transaction changed. `writer`: this process does nothing but write for the
    others, so that its event loop may wait for its turn.
    """

    turns: str
    count: int
    wrote: Callable[[Collection[str]], object]
    writer: bool = False


def _nothing(_tables: Collection[str]) -> None:
    return


class Database:
    """Runs queries: `read` and `write` take a function of a connection, each call is one transaction."""

    def __init__(
        self,
        runner: _StatementRunner,
        name: str,
        field: str,
        *,
        shared: bool = False,
        workers: Workers | None = None,
    ):
        self._runner = runner
        self.polled = shared or workers is not None
        """Whether other processes write, so that only a look into the database shows what is new."""
        self._wrote = _nothing if workers is None else workers.wrote
        self._name = name
        self._field = field
        self.shared = shared
        """Whether other servers may use this database."""
        self.staged = asyncio.Event()
        """Set after each commit of a transaction that called `mark_staged`."""

    @classmethod
    async def open(cls, where: str, workers: Workers | None = None) -> Database:
        """Open the SQLite file or the `postgresql://` URL, and create or migrate the tables. `workers`: other processes
        of this server use it too.

        Raises `InvalidRequest` for an invalid URL, `PlatformError` when the database cannot be used or is newer than
        this code. No error shows a password.
        """
        scheme, separator, rest = where.partition("://")
        if not separator or scheme == "sqlite":
            path = rest.removeprefix("/") if separator else where
            if not path:
                raise InvalidRequest("the URL names no file", field="database", hint="write sqlite:////path/to/file")
            return await cls._opened(
                lambda: _Sqlite(path, workers), f"the database {path}", "data_dir", workers=workers
            )
        host = _host_of(where, scheme)
        from carrel.store.postgres import Postgres

        name = f"the PostgreSQL database on {host}"
        return await cls._opened(
            lambda: Postgres(where, notes=workers is not None), name, "database", shared=True, workers=workers
        )

    @classmethod
    async def _opened(
        cls,
        make: Callable[[], _StatementRunner],
        name: str,
        field: str,
        *,
        shared: bool = False,
        workers: Workers | None,
    ) -> Database:
        with _driver_errors(name, field):
            database = cls(make(), name, field, shared=shared, workers=workers)
        try:
            await database.write(migrate)
        except BaseException:
            await database.close()
            raise
        return database

    async def read(self, query: Query[T]) -> T:
        """Run a query that changes nothing and is one statement."""
        with _driver_errors(self._name, self._field, self._runner.failures):
            return await self._runner.read(query)

    async def write(self, query: Query[T]) -> T:
        """Run a query in a transaction: all of it is written, or nothing.

        An `IntegrityError` is passed on, as only the caller knows which constraint was violated.
        """
        with _driver_errors(self._name, self._field, self._runner.failures):
            result, staged, changed = await self._runner.write(partial(_noting, query))
        if staged:
            self.staged.set()
        if changed:
            self._wrote(changed)
        return result

    async def execute(self, statement: Executable) -> int:
        """Run one statement that changes rows and return how many it changed. Raises what `write` raises."""
        return await self.write(lambda connection: connection.execute(statement).rowcount)

    async def all(self, query: Select[Any], make: Callable[[RowMapping], T]) -> list[T]:
        """Return the result of `make` for each row of a query."""
        return await self.read(lambda connection: [make(row) for row in connection.execute(query).mappings()])

    async def first(self, query: Select[Any], make: Callable[[RowMapping], T]) -> T | None:
        """Return the result of `make` for the first row of a query, or None when there is no row."""
        found = await self.all(query.limit(1), make)
        return found[0] if found else None

    async def rows(self, query: Select[Any]) -> list[Any]:
        """Return the rows of a query."""
        return await self.read(lambda connection: list(connection.execute(query)))

    async def scalars(self, query: Select[Any]) -> list[Any]:
        """Return the first column of a query."""
        return await self.read(lambda connection: list(connection.execute(query).scalars()))

    def write_here(self, query: Query[T]) -> T:
        """Write with a short query in the caller's thread. Raises `Occupied` where it would have to wait."""
        with _driver_errors(self._name, self._field, self._runner.failures):
            result, staged, changed = self._runner.write_here(partial(_noting, query))
        if staged:
            self.staged.set()
        if changed:
            self._wrote(changed)
        return result

    async def write_soon(self, query: Query[T]) -> T:
        """Write with a short query: in the caller's thread where it need not wait for more than the turns of other
        processes, else as `write` does.
        """
        for _ in range(_TURNS):
            try:
                return self.write_here(query)
            except OthersTurn:
                await asyncio.sleep(_TURN_S)
            except Occupied:
                break
        return await self.write(query)

    async def sync(self) -> None:
        """Return once everything written survives a power cut."""
        with _driver_errors(self._name, self._field):
            await self._runner.sync()

    async def close(self) -> None:
        """Wait for running queries and close every connection."""
        await self._runner.close()


def _host_of(url: str, scheme: str) -> str:
    """Check a URL and return its host for error messages. An error never quotes the URL: it may hold a password."""
    if scheme not in DATABASES:
        raise InvalidRequest(
            f"a database of the kind '{scheme[:20]}' is not supported"
            if re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme)
            else "the database is not a valid URL",
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
def _driver_errors(name: str, field: str, failures: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn exceptions of drivers into one error that says which database failed."""
    known: tuple[type[Exception], ...] = (SQLAlchemyError, OSError, *failures)
    try:
        yield
    except IntegrityError:
        raise
    except known as error:
        said = getattr(error, "orig", None) or error
        words = f"{name} cannot be used: {str(said) or type(said).__name__}"
        if field == "data_dir":
            hint = "check its mode and free space; a damaged file has to be moved away"
            raise PlatformError(words, field=field, hint=hint) from None
        hint = "check that it runs, and the host, user and password of the setting `database`"
        if isinstance(error, ProgrammingError | DataError):
            raise PlatformError(words, field=field, hint=hint) from None
        raise DatabaseUnavailable(words, field=field, hint=hint, retry=True, retry_after=RETRY_S) from None
