"""Measures a directory tree that hostile code may be changing. Follows no link and stays on one file system."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import time
from dataclasses import dataclass

from carrel.primitives import walk

ENTRIES_PER_MB = 200
MIN_ENTRIES = 10_000


@dataclass(frozen=True, slots=True)
class Usage:
    """The result of a scan. `complete` is False when it stopped early or could not read all of the tree."""

    bytes: int
    entries: int
    complete: bool
    seconds: float


def scan(path: str, *, stop_bytes: int | None = None, stop_entries: int | None = None) -> Usage:
    """Count allocated bytes and entries below `path`; stops when one of the bounds is exceeded. Blocking."""
    began = time.monotonic()
    total = entries = 0
    linked: set[int] = set()
    try:
        top = os.open(path, walk.DIRECTORY)
    except OSError:
        return Usage(0, 0, False, time.monotonic() - began)
    unseen = False

    def enter(name: str, parent: int) -> int:
        nonlocal unseen
        try:
            return os.open(name, walk.DIRECTORY, dir_fd=parent)
        except FileNotFoundError:
            raise
        except OSError as error:  # skip it like one that has vanished, but remember
            unseen = True
            raise FileNotFoundError(errno.ENOENT, error.strerror) from None

    chain = walk.OpenDirectories(top, enter)
    try:
        more = True
        while more:
            here = chain.levels[-1]
            with os.scandir(here.fd) as listing:
                for entry in listing:
                    entries += 1
                    try:
                        info = os.stat(entry.name, dir_fd=here.fd, follow_symlinks=False)
                    except OSError:
                        continue
                    if info.st_dev != chain.device:
                        continue
                    if info.st_nlink == 1 or stat.S_ISDIR(info.st_mode):
                        total += info.st_blocks * 512
                    elif info.st_ino not in linked:
                        linked.add(info.st_ino)
                        total += info.st_blocks * 512
                    if stat.S_ISDIR(info.st_mode):
                        here.waiting.append(entry.name)
                    if (stop_bytes is not None and total > stop_bytes) or (
                        stop_entries is not None and entries > stop_entries
                    ):
                        return Usage(total, entries, False, time.monotonic() - began)
            more = chain.next() is not None
    except OSError:  # directories were moved again and again
        unseen = True
    finally:
        chain.close()
        os.close(top)
    return Usage(total, entries, not unseen, time.monotonic() - began)


async def measure(path: str, *, stop_bytes: int | None = None, stop_entries: int | None = None) -> Usage:
    """Call `scan` in a thread."""
    return await asyncio.to_thread(scan, path, stop_bytes=stop_bytes, stop_entries=stop_entries)


def max_entries(disk_mb: int) -> int:
    """Return how many files and directories a workspace of that size may hold."""
    return max(MIN_ENTRIES, disk_mb * ENTRIES_PER_MB)


def verdict(usage: Usage, disk_mb: int) -> str | None:
    """Return why a workspace is over its limit, or None. One that cannot be read completely counts as over."""
    if usage.bytes > disk_mb * 1024 * 1024:
        return f"the workspace is over its {disk_mb} MB"
    if usage.entries > max_entries(disk_mb):
        return f"the workspace has more than {max_entries(disk_mb)} files and directories"
    if not usage.complete:
        return "the workspace has directories that cannot be read"
    return None
