"""Walking directory trees by descriptors: one open directory at a time, never through a symlink.

The walk goes up by `..`, and only into the directory that it came from: a directory that was moved meanwhile ends it.
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
class TreeEntry:
    """A file or directory: its path, its status, and its target if it is a symlink."""

    path: bytes
    status: os.stat_result
    target: bytes | None


def entry_at(directory: int, name: bytes, path: bytes) -> TreeEntry:
    """Return the entry of that name. A symlink is not followed."""
    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    target = None
    if stat.S_ISLNK(status.st_mode):
        try:
            target = os.readlink(name, dir_fd=directory)
        except OSError as error:
            if error.errno != errno.EINVAL:  # no symlink any more
                raise
    return TreeEntry(path, status, target)


class Walk:
    """Walks at most `limit` entries below an open directory, ordered by name, a directory before its contents.

    Afterwards `truncated` says whether entries are missing: beyond the limit, unreadable, or too deep for a path.
    """

    def __init__(self, directory: int, prefix: bytes, *, recursive: bool, limit: int):
        self._directory = directory
        self._prefix = b"" if prefix == b"." else prefix
        self._recursive = recursive
        self._limit = limit
        self._pending: list[tuple[int, bytes]] = []
        self.truncated = False

    def steps(self) -> Generator[TreeEntry | None, None, None]:
        """Yield the entries, once, and close the directory. After a `None` the caller may let other tasks run."""
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
        # Only the first `left` of the waiting names will be yielded; one more shows that there are more.
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
