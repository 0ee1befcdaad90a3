"""How much a tree holds, counted while hostile code may be changing it. Follows no link and leaves no file
system.

Blocking: `measure` is the form for the event loop.
"""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass

MAX_DEPTH = 200
ENTRIES_PER_MB = 200
MIN_ENTRIES = 10_000
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class Usage:
    """What a scan found. `complete` is False when it stopped early, or could not see all of the tree."""

    bytes: int
    entries: int
    complete: bool
    seconds: float


def scan(path: str, *, stop_bytes: int | None = None, stop_entries: int | None = None) -> Usage:
    """Allocated bytes and entries beneath `path`; stops once one of the bounds is passed."""
    began = time.monotonic()
    total = entries = 0
    complete = True
    linked: set[int] = set()
    try:
        top = os.open(path, _DIRECTORY)
    except OSError:
        return Usage(0, 0, False, time.monotonic() - began)
    device = os.fstat(top).st_dev
    stack: list[tuple[int, Iterator[os.DirEntry[str]]]] = []
    try:
        stack.append((top, os.scandir(top)))
        while stack:
            fd, entry_iterator = stack[-1]
            entry = next(entry_iterator, None)
            if entry is None:
                stack.pop()
                os.close(fd)
                continue
            entries += 1
            try:
                info = os.stat(entry.name, dir_fd=fd, follow_symlinks=False)
            except OSError:
                continue
            if info.st_dev != device:
                continue
            if info.st_nlink == 1 or stat.S_ISDIR(info.st_mode):
                total += info.st_blocks * 512
            elif info.st_ino not in linked:
                linked.add(info.st_ino)
                total += info.st_blocks * 512
            if (stop_bytes is not None and total > stop_bytes) or (stop_entries is not None and entries > stop_entries):
                complete = False
                break
            if stat.S_ISDIR(info.st_mode):
                if len(stack) >= MAX_DEPTH:
                    complete = False
                    continue
                try:
                    child = os.open(entry.name, _DIRECTORY, dir_fd=fd)
                except FileNotFoundError:
                    continue
                except OSError:
                    complete = False
                    continue
                stack.append((child, os.scandir(child)))
    finally:
        for fd, iterator in stack:
            iterator.close()  # type: ignore[attr-defined]
            os.close(fd)
    return Usage(total, entries, complete, time.monotonic() - began)


async def measure(path: str, *, stop_bytes: int | None = None, stop_entries: int | None = None) -> Usage:
    """`scan` in a thread."""
    return await asyncio.to_thread(scan, path, stop_bytes=stop_bytes, stop_entries=stop_entries)


def max_entries(disk_mb: int) -> int:
    """How many files and directories a workspace of that size may hold."""
    return max(MIN_ENTRIES, disk_mb * ENTRIES_PER_MB)


def verdict(usage: Usage, disk_mb: int) -> str | None:
    """Why a workspace is over its limit, or None. What cannot be seen counts as over."""
    if usage.bytes > disk_mb * 1024 * 1024:
        return f"the workspace is over its {disk_mb} MB"
    if usage.entries > max_entries(disk_mb):
        return f"the workspace has more than {max_entries(disk_mb)} files and directories"
    if not usage.complete:
        return "the workspace has directories that are nested too deep or cannot be read"
    return None
