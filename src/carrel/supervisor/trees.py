"""Walking and removing directory trees by descriptors: one open directory at a time, never through a symlink.

Going up is by `..`, and only into the very directory the walk came down from: one that was moved meanwhile
ends the walk. It knows nothing of paths from callers.
"""

from __future__ import annotations

import asyncio
import errno
import heapq
import os
import stat
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from carrel.supervisor.kernel import chmod_directory
from carrel.supervisor.paths import PATH_LIMIT

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BREATH = 256
_SLACK = 4096
_CHILDREN = 64
_REFILLS = 100

Identity = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Entry:
    """What a walk came by: its path, and where it points if it is a symlink."""

    path: bytes
    status: os.stat_result
    target: bytes | None


def entry_at(directory: int, name: bytes, path: bytes) -> Entry:
    """The entry of that name, itself and not what it may point to."""
    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    target = None
    if stat.S_ISLNK(status.st_mode):
        try:
            target = os.readlink(name, dir_fd=directory)
        except OSError as error:
            if error.errno != errno.EINVAL:  # no symlink any more
                raise
    return Entry(path, status, target)


def _identity(directory: int) -> Identity:
    status = os.fstat(directory)
    return status.st_dev, status.st_ino


def _above(directory: int, expected: Identity) -> int:
    parent = os.open("..", _OPEN, dir_fd=directory)
    if _identity(parent) != expected:
        os.close(parent)
        raise OSError(errno.ESTALE, "the directory was moved")
    return parent


class Walk:
    """At most `limit` entries below an open directory, ordered by name, a directory before what is in it.

    `truncated` tells afterwards of more: beyond the limit, unreadable, or deeper than a path can name.
    """

    def __init__(self, directory: int, prefix: bytes, *, recursive: bool, limit: int):
        self._directory = directory
        self._prefix = b"" if prefix == b"." else prefix
        self._recursive = recursive
        self._limit = limit
        self._pending: list[tuple[int, bytes]] = []
        self.truncated = False

    def steps(self) -> Generator[Entry | None, None, None]:
        """The entries, once; closes the directory. `None` among them is a good moment to let others work."""
        here, path, left = self._directory, self._prefix, self._limit
        came_from: list[tuple[Identity, bytes]] = []
        try:
            yield from self._scan(here, 0, left)
            while self._pending:
                depth, name = self._pending.pop()
                while len(came_from) > depth:
                    expected, path = came_from.pop()
                    parent = _above(here, expected)
                    os.close(here)
                    here = parent
                if left == 0:
                    self.truncated = True
                    return
                full = path + b"/" + name if path else name
                if len(full) > PATH_LIMIT:
                    self.truncated = True
                    continue
                try:
                    entry = entry_at(here, name, full)
                except FileNotFoundError:
                    continue
                left -= 1
                yield entry
                if not self._recursive or not stat.S_ISDIR(entry.status.st_mode):
                    continue
                try:
                    below = os.open(name, _OPEN, dir_fd=here)
                except PermissionError:
                    self.truncated = True
                    continue
                except OSError as error:
                    if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
                        continue
                    raise
                came_from.append((_identity(here), path))
                os.close(here)
                here, path = below, full
                yield from self._scan(here, len(came_from), left)
        finally:
            os.close(here)

    def _scan(self, here: int, depth: int, left: int) -> Iterator[None]:
        # Of all the names that wait only the first `left` will be shown; one more tells that there were more.
        keep = left + 1
        names: list[bytes] = []
        with os.scandir(here) as found:
            for count, item in enumerate(found, 1):
                names.append(os.fsencode(item.name))
                if len(names) >= keep + _SLACK:
                    names = heapq.nsmallest(keep, names)
                    self.truncated = True
                if count % _BREATH == 0:
                    yield None
        names.sort(reverse=True)
        self._pending.extend((depth, name) for name in names)
        surplus = len(self._pending) - keep
        if surplus > 0:
            del self._pending[:surplus]
            self.truncated = True


def _enter(parent: int, name: bytes) -> int:
    """Open a directory to empty it; the owner's missing permissions are given first."""
    try:
        directory = os.open(name, _OPEN, dir_fd=parent)
    except PermissionError:
        chmod_directory(parent, name, 0o700)
        directory = os.open(name, _OPEN, dir_fd=parent)
    status = os.fstat(directory)
    if status.st_mode & 0o700 != 0o700 and status.st_uid == os.geteuid():
        try:
            os.fchmod(directory, stat.S_IMODE(status.st_mode) | 0o700)
        except OSError:
            os.close(directory)
            raise
    return directory


async def remove_tree(parent: int, name: bytes) -> None:
    """Remove the directory `name` with everything in it, what appears meanwhile included, within reason."""
    for attempt in range(_REFILLS):
        await _empty(parent, name)
        try:
            os.rmdir(name, dir_fd=parent)
            return
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or attempt == _REFILLS - 1:
                raise


async def _empty(parent: int, name: bytes) -> None:
    here = _enter(parent, name)
    came_from: list[tuple[Identity, bytes, list[bytes]]] = []
    waiting: list[bytes] = []
    steps = surprises = 0
    try:
        while True:
            steps += 1
            if steps % _BREATH == 0:
                await asyncio.sleep(0)
            if not waiting:
                with os.scandir(here) as found:
                    for item in found:
                        raw = os.fsencode(item.name)
                        if item.is_dir(follow_symlinks=False):
                            waiting.append(raw)
                            if len(waiting) == _CHILDREN:
                                break
                            continue
                        try:
                            os.unlink(raw, dir_fd=here)
                        except FileNotFoundError:
                            pass
                        except IsADirectoryError:
                            surprises += 1
                        steps += 1
                        if steps % _BREATH == 0:
                            await asyncio.sleep(0)
            if waiting:
                child = waiting.pop()
                try:
                    below = _enter(here, child)
                except OSError as error:
                    # Taken away or swapped meanwhile: the next scan sees what is there now.
                    surprises += 1
                    if error.errno not in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP} or surprises > _REFILLS:
                        raise
                    continue
                came_from.append((_identity(here), child, waiting))
                os.close(here)
                here, waiting = below, []
                continue
            if not came_from:
                break
            expected, entered, waiting = came_from.pop()
            above = _above(here, expected)
            os.close(here)
            here = above
            try:
                os.rmdir(entered, dir_fd=here)
            except FileNotFoundError:
                pass
            except OSError as error:
                surprises += 1
                if error.errno not in {errno.ENOTEMPTY, errno.ENOTDIR} or surprises > _REFILLS:
                    raise
    finally:
        os.close(here)
