"""Locks in a file or in PostgreSQL, so that at most one process runs a thread. They end with the process."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

import psycopg

from carrel.errors import PlatformError, ThreadBusy

LOOK_EVERY_S = 0.1
PING_EVERY_S = 5.0
PING_S = 5.0

Lost = Callable[[], None]
"""Called when a lock is lost without being released."""


class Locks(Protocol):
    """Takes and releases locks."""

    async def take(self, number: int, lost: Lost) -> bool:
        """Take a lock if it is free."""

    async def release(self, number: int) -> None:
        """Release a lock."""


@asynccontextmanager
async def held(locks: Locks, name: str, wait_s: float = 0.0) -> AsyncIterator[None]:
    """Hold the lock of a name. Raises `ThreadBusy` when another holds it for longer than `wait_s`.

    If the lock is lost, the block is cancelled and `PlatformError` raised.
    """
    number, until, loop = _number(name), time.monotonic() + wait_s, asyncio.get_running_loop()
    try:
        async with asyncio.timeout(None) as ending:

            def lost() -> None:
                ending.reschedule(loop.time())

            while not await locks.take(number, lost):
                left = until - time.monotonic()
                if left <= 0:
                    raise ThreadBusy(
                        f"thread '{name[:128]}' is running already", field="thread_id", hint="wait until it pauses"
                    )
                await asyncio.sleep(min(left, LOOK_EVERY_S))
            try:
                yield
            finally:
                await asyncio.shield(locks.release(number))
    except TimeoutError as error:
        if not ending.expired():
            raise
        raise PlatformError(
            f"the lock of thread '{name[:128]}' was lost with its database connection",
            hint="run it again: it continues",
        ) from error


def _number(name: str) -> int:
    """Hash a name to a lock number; a collision is practically impossible."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") >> 2


class FileLocks:
    """Locks on bytes of one file. The kernel releases them when the process ends in any way."""

    def __init__(self, path: str):
        self._path = path
        self._files: dict[int, int] = {}

    async def take(self, number: int, lost: Lost) -> bool:
        """Take a lock if no process holds it, this one included."""
        del lost  # file locks are not lost
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        wanted = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0)
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, wanted)
        except (BlockingIOError, PermissionError):
            os.close(descriptor)
            return False
        except BaseException:
            os.close(descriptor)
            raise
        self._files[number] = descriptor
        return True

    async def release(self, number: int) -> None:
        """Release a lock."""
        os.close(self._files.pop(number))


class PostgresLocks:
    """Advisory locks on one connection; when it breaks, all of them are lost."""

    def __init__(self, url: str):
        self._url = url
        self._connection: psycopg.AsyncConnection[Any] | None = None
        self._connecting = asyncio.Lock()
        self._held: dict[int, Lost] = {}

    async def take(self, number: int, lost: Lost) -> bool:
        """Take a lock if no process holds it, this one included."""
        connection = await self._connected()
        if number in self._held:
            return False
        self._held[number] = lost
        asking = asyncio.ensure_future(self._ask(connection, number))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:  # the database may have granted it already
            await asyncio.shield(self._give_back(asking, number))
            raise

    async def _ask(self, connection: psycopg.AsyncConnection[Any], number: int) -> bool:
        taken = False
        try:
            cursor = await connection.execute("SELECT pg_try_advisory_lock(%s)", (number,))
            row = await cursor.fetchone()
            taken = bool(row and row[0])
        except psycopg.Error as error:
            raise PlatformError("the database of the locks does not answer", hint="is it running?") from error
        finally:
            if not taken:
                self._held.pop(number, None)
        return taken

    async def _give_back(self, asking: asyncio.Future[bool], number: int) -> None:
        with suppress(PlatformError):
            if await asking:
                await self.release(number)

    async def release(self, number: int) -> None:
        """Release a lock, unless it was lost."""
        if self._held.pop(number, None) is None or self._connection is None:
            return
        with suppress(psycopg.Error):
            await self._connection.execute("SELECT pg_advisory_unlock(%s)", (number,))

    async def watch(self) -> None:
        """Check the connection regularly, and call `lost` of every holder when it breaks."""
        while True:
            await asyncio.sleep(PING_EVERY_S)
            connection = self._connection
            if connection is None:
                continue
            try:
                async with asyncio.timeout(PING_S):
                    await connection.execute("SELECT 1")
            except (psycopg.Error, TimeoutError):
                await self._drop()

    async def close(self) -> None:
        """Close the connection, which releases every lock."""
        await self._drop()

    async def _drop(self) -> None:
        connection, self._connection = self._connection, None
        told, self._held = self._held, {}
        for lost in told.values():
            lost()
        if connection is not None:
            await connection.close()

    async def _connected(self) -> psycopg.AsyncConnection[Any]:
        async with self._connecting:
            if self._connection is not None and self._connection.closed:
                await self._drop()
            if self._connection is None:
                try:
                    self._connection = await psycopg.AsyncConnection.connect(
                        self._url, autocommit=True, connect_timeout=10
                    )
                except psycopg.Error as error:
                    raise PlatformError(
                        "the database of the locks cannot be reached", field="database", hint="is it running?"
                    ) from error
            return self._connection
