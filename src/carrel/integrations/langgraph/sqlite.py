"""SQLite for an event loop: most statements are so short that the way to a thread and back takes longer.

A connection of `aiosqlite`, but what is short runs here and now: it goes to the page cache. Nothing here waits for
another process or for the disk. Who finds the database locked tries again after a pause; and long statements run in the
connection's own thread, which also brings the log of changes into the file. Knows nothing of what is stored.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from aiosqlite import Connection

PAUSE_S = 0.005
IN_A_ROW = 100
"""After so many commits here one goes to the thread, and the log of changes is emptied."""
_LONG = re.compile(r"\bORDER BY\b|\bIN \(|\bcount\(|^\s*(CREATE|DROP|ALTER|VACUUM|PRAGMA)\b", re.IGNORECASE)
"""What a statement has that may look at many rows, or change more than rows."""
_RUN = frozenset({"execute", "executemany", "executescript"})
_END = frozenset({"commit", "rollback"})


class NearConnection(Connection):
    """One connection, for one user at a time. `busy_s` is how long it tries while others have the database locked.

    From a long statement to the end of its transaction all is done in the thread. With `lookups` every statement is
    a short one, whatever it looks like.
    """

    def __init__(self, path: str, busy_s: float, *, lookups: bool = False):
        super().__init__(lambda: _connected(path), iter_chunk_size=64)
        self._busy_s = busy_s
        self._lookups = lookups
        self._far = False
        self._in_thread = 0
        self._commits = 0

    async def _execute(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function of the driver; every method of a connection and its cursors comes here."""
        if not self._running or self._connection is None:
            raise ValueError("Connection closed")
        name = fn.__name__
        if name == "executemany":  # it may have to be tried again
            args = (args[0], list(args[1]), *args[2:])
        if name in _RUN:
            self._far = self._far or name == "executescript" or self._is_long(args[0])
        far = self._far or self._in_thread > 0 or (name == "close" and fn == self._connection.close)
        if name in _END:
            self._far = False
            if name == "commit" and self._connection.in_transaction:
                self._commits += 1
            if self._commits >= IN_A_ROW:
                self._commits = 0
                fn, args, kwargs, far = _brought_in, (fn, self._connection), {}, True
        until = time.monotonic() + self._busy_s
        while True:
            try:
                return await self._there(fn, *args, **kwargs) if far else fn(*args, **kwargs)
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                    raise
            await asyncio.sleep(PAUSE_S)

    def _is_long(self, statement: str) -> bool:
        return not self._lookups and _LONG.search(statement) is not None

    async def _there(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._in_thread += 1
        try:
            return await super()._execute(fn, *args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            self._in_thread -= 1


def _connected(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=0, check_same_thread=False)
    connection.execute("PRAGMA wal_autocheckpoint=0")
    return connection


def _brought_in(commit: Callable[[], object], connection: sqlite3.Connection) -> None:
    commit()
    with suppress(sqlite3.OperationalError):  # then the next time
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
