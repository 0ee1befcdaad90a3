"""Walking directory trees by descriptors: one open directory at a time, never through a symlink.

Going up is by `..`, and only into the very directory the walk came down from: one that was moved meanwhile
ends the walk. It knows nothing of paths from callers.
"""

from __future__ import annotations

import errno
import heapq
import os
import stat
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from carrel.primitives.trees import DIRECTORY, Identity, identity, open_parent
from carrel.supervisor.paths import PATH_LIMIT

_BREATH = 256
_SLACK = 4096


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
                    parent = open_parent(here, expected)
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
                    below = os.open(name, DIRECTORY, dir_fd=here)
                except PermissionError:
                    self.truncated = True
                    continue
                except OSError as error:
                    if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
                        continue
                    raise
                came_from.append((identity(here), path))
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
