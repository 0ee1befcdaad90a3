"""Locks between the processes of one server, by key, in one file. The kernel releases the locks of a process that dies.

A key is a byte of the file: nothing is written, and no file is left for each key. The locks belong to the opened file,
so each process opens it itself.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import struct
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress

from carrel.primitives.backoff import Backoff
from carrel.primitives.keyed_lock import KeyedLocks

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05

LocksOf = Callable[[Hashable], AbstractAsyncContextManager[object]]
"""Returns the lock of a key: `async with locks(key):`."""


class FileLock:
    """One byte of an open file as a lock. For one thread at a time."""

    def __init__(self, descriptor: int, position: int = 0):
        self._descriptor = descriptor
        self._position = position

    def take(self, *, wait: bool) -> bool:
        """Take the lock; without `wait`, return False if another process has it. Blocking with `wait`."""
        try:
            self._set(fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, fcntl.F_WRLCK)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        """Release the lock."""
        self._set(fcntl.F_OFD_SETLK, fcntl.F_UNLCK)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock for the length of the block. Blocking."""
        self.take(wait=True)
        try:
            yield
        finally:
            self.release()

    def _set(self, command: int, kind: int) -> None:
        fcntl.fcntl(self._descriptor, command, struct.pack("hhqqi4x", kind, os.SEEK_SET, self._position, 1, 0))


def open_lock_file(path: str) -> int:
    """Open a file for locks. Children that are started do not get it."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


class ProcessLocks:
    """Locks by key between the processes that open one file. For one event loop."""

    def __init__(self, path: str):
        self._descriptor = open_lock_file(path)
        self._here = KeyedLocks()

    def of(self, key: Hashable) -> AbstractAsyncContextManager[None]:
        """Return the lock of a key: `async with locks.of(key):`."""
        return self._held(key)

    @asynccontextmanager
    async def _held(self, key: Hashable) -> AsyncIterator[None]:
        async with self._here.of(key):
            lock, backoff = self._lock(key), Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            while not lock.take(wait=False):  # noqa: ASYNC110 - the kernel tells nobody that another process released it
                await asyncio.sleep(backoff.next_pause())
            try:
                yield
            finally:
                lock.release()

    @asynccontextmanager
    async def unless_held(self, key: Hashable) -> AsyncIterator[bool]:
        """Hold the lock of a key for the block; yield False when another has it."""
        here = self._here.of(key)
        if here.locked():
            yield False
            return
        async with here:
            lock = self._lock(key)
            taken = lock.take(wait=False)
            try:
                yield taken
            finally:
                if taken:
                    lock.release()

    def close(self) -> None:
        """Release every lock."""
        with suppress(OSError):
            os.close(self._descriptor)

    def _lock(self, key: Hashable) -> FileLock:
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
        return FileLock(self._descriptor, int.from_bytes(digest, "little") >> 2)
