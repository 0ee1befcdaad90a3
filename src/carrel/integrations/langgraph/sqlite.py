"""SQLite on the event loop: most statements are so short that passing them to a thread and back takes longer.

This connection of `aiosqlite` runs short statements on the loop, where they only touch the page cache. Nothing here
waits for another process or for the disk: when the database is locked it tries again after a pause, and long statements
and checkpoints of the write-ahead log run in the connection's own thread.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from aiosqlite import Connection

PAUSE_S = 0.005
IN_A_ROW = 100
"""After this many commits on the loop, one runs in the thread with a checkpoint of the write-ahead log."""
_LONG = re.compile(r"\bORDER BY\b|\bIN \(|\bcount\(|^\s*(CREATE|DROP|ALTER|VACUUM|PRAGMA)\b", re.IGNORECASE)
"""Matches statements that may read many rows, or change the schema."""
_RUN = frozenset({"execute", "executemany", "executescript"})
_END = frozenset({"commit", "rollback"})


class InlineConnection(Connection):
    """One connection, for one user at a time. `busy_s` is how long it retries while the database is locked.

    From a long statement to the end of its transaction everything runs in the thread. With `lookups` every statement
    counts as short. A statement that fails rolls back a transaction that it began, and a cancelled one rolls back any
    transaction: it would stay open and show old data.
    """

    def __init__(self, path: str, busy_s: float, *, lookups: bool = False):
        super().__init__(lambda: _connected(path), iter_chunk_size=64)
        self._busy_s = busy_s
        self._lookups = lookups
        self._use_thread = False
        self._in_thread = 0
        self._commits = 0

    async def _execute(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function of the driver. Every method of a connection and its cursors calls this."""
        if not self._running or self._connection is None:
            raise ValueError("Connection closed")
        name, connection = fn.__name__, self._connection
        if name == "executemany":  # a list, because it may be tried again
            args = (args[0], list(args[1]), *args[2:])
        if name in _RUN:
            self._use_thread = self._use_thread or name == "executescript" or self._is_long(args[0])
            fn, args = _run_statement, (fn, connection, *args)
        in_thread = self._use_thread or self._in_thread > 0 or (name == "close" and fn == connection.close)
        if name in _END:
            self._use_thread = False
            if name == "commit" and connection.in_transaction:
                self._commits += 1
            if self._commits >= IN_A_ROW:
                self._commits = 0
                fn, args, kwargs, in_thread = _commit_and_checkpoint, (fn, connection), {}, True
        try:
            return await self._retry(in_thread, fn, *args, **kwargs)
        except asyncio.CancelledError:
            if name not in _END and name != "close":
                self._use_thread = False
                if self._in_thread > 0:
                    self._queue(partial(_roll_back, connection))
                else:
                    _roll_back(connection)
            raise

    async def _retry(self, in_thread: bool, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        until = time.monotonic() + self._busy_s
        while True:
            try:
                return await self._queue(partial(fn, *args, **kwargs)) if in_thread else fn(*args, **kwargs)
            except sqlite3.OperationalError as error:
                if not _is_busy(error) or time.monotonic() > until:
                    raise
            await asyncio.sleep(PAUSE_S)

    def _is_long(self, statement: str) -> bool:
        return not self._lookups and _LONG.search(statement) is not None

    def _queue(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        """Run a function in the thread, after those queued before. It runs even if the caller was cancelled, so until
        then all later calls go to the thread, too.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def counted() -> Any:
            try:
                return work()
            finally:
                loop.call_soon_threadsafe(self._finished)

        self._in_thread += 1
        self._tx.put_nowait((done, counted))
        return done

    def _finished(self) -> None:
        self._in_thread -= 1


def _is_busy(error: sqlite3.OperationalError) -> bool:
    """Return whether to retry, because the database is locked. Retrying does not help an outdated read snapshot."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)  # errors of the Python driver have no code
    return code & 0xFF == sqlite3.SQLITE_BUSY and code != sqlite3.SQLITE_BUSY_SNAPSHOT


def _run_statement(fn: Callable[..., Any], connection: sqlite3.Connection, *args: Any, **kwargs: Any) -> Any:
    """Run a statement; if it fails, roll back a transaction that it began."""
    before = connection.in_transaction
    try:
        return fn(*args, **kwargs)
    except sqlite3.Error:
        if not before:
            _roll_back(connection)
        raise


def _roll_back(connection: sqlite3.Connection) -> None:
    with suppress(sqlite3.Error):  # it may be closed
        connection.rollback()


def _connected(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=0, check_same_thread=False)
    connection.execute("PRAGMA wal_autocheckpoint=0")
    return connection


def _commit_and_checkpoint(commit: Callable[[], object], connection: sqlite3.Connection) -> None:
    commit()
    with suppress(sqlite3.OperationalError):  # try again with a later commit
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
