"""Finds the files of the workspace that changed between two moments.

Directories are watched with inotify, from the first request on. Where that is not possible (too many directories, no
watch left, lost events) the workspace is scanned, up to a limit.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import stat
import struct
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from carrel.primitives import libc
from carrel.supervisor.files import Files, Stamp
from carrel.supervisor.paths import text

MOST_WATCHED = 8192
MOST_PRODUCED = 10_000
MOST_NAMED = 768 * 1024
"""Limits of the list: number of files, and bytes of their names as JSON."""
DESCRIPTION = ".context.json"
_BREATH = 64
_READ = 64 * 1024
_HEAD = struct.Struct("iIII")
_MODIFY, _CLOSE_WRITE, _MOVED_FROM, _MOVED_TO, _CREATE = 0x02, 0x08, 0x40, 0x80, 0x100
_OVERFLOW, _IGNORED, _ISDIR = 0x4000, 0x8000, 0x40000000
_ONLYDIR = 0x01000000
_MASK = _MODIFY | _CLOSE_WRITE | _MOVED_FROM | _MOVED_TO | _CREATE | _ONLYDIR
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class _Start:
    """The start of a search: the time of the file system, and the number of events so far (None without inotify)."""

    time_ns: int
    count: int | None


class ChangedFiles:
    """The result of a search, available after the `with` block."""

    def __init__(self) -> None:
        self._room = MOST_NAMED
        self.found: list[str] = []
        self.truncated = False
        """Whether more files changed than are listed."""

    def add(self, path: str) -> bool:
        """Add a file; return False when the list is full. The description of the workspace is left out, because the
        server writes it.
        """
        if path == DESCRIPTION:
            return True
        self._room -= len(json.dumps(path)) + 1
        self.truncated = self.truncated or self._room < 0 or len(self.found) >= MOST_PRODUCED
        if not self.truncated:
            self.found.append(path)
        return not self.truncated


class ProducedFiles:
    """The changes of one workspace."""

    def __init__(self, files: Files):
        self._files = files
        self._inotify = -1
        self._paths: dict[int, bytes] = {}
        self._watches: dict[bytes, int] = {}
        self._changed: dict[bytes, int] = {}
        self._count = 0
        self._searches = 0
        self._usable = True
        self._busy = asyncio.Lock()

    def close(self) -> None:
        if self._inotify >= 0:
            os.close(self._inotify)
            self._inotify = -1
        self._paths.clear()
        self._watches.clear()

    @asynccontextmanager
    async def watching(self, given: Collection[Stamp] = ()) -> AsyncIterator[ChangedFiles]:
        """Find the regular files that change during the block. Files of `given` are left out unless they changed after
        they were written.
        """
        look, moment = ChangedFiles(), await self._begin()
        try:
            yield look
        finally:
            await self._end(moment, given, look)

    async def _begin(self) -> _Start:
        async with self._busy:
            if self._usable and self._inotify < 0:
                await self._watch_all()
            elif self._usable:
                self._read_events()
            if self._searches == 0:
                self._changed.clear()
            self._searches += 1
            return _Start(self._files.mark(), self._count if self._inotify >= 0 else None)

    async def _end(self, moment: _Start, given: Collection[Stamp], look: ChangedFiles) -> None:
        try:
            async with self._busy:
                await self._collect(moment, given, look)
        finally:
            self._searches -= 1

    async def _collect(self, moment: _Start, given: Collection[Stamp], look: ChangedFiles) -> None:
        if moment.count is None or self._inotify < 0 or not self._read_events():
            for name in self._files.produced_since(moment.time_ns, MOST_PRODUCED + 1, given):
                look.add(name)
            return
        seen = sorted(path for path, count in self._changed.items() if count > moment.count)
        for number, path in enumerate(seen, 1):
            if self._produced(path, moment.time_ns, given) and not look.add(text(path)):
                return
            if number % _BREATH == 0:
                await asyncio.sleep(0)

    def _produced(self, path: bytes, since: int, given: Collection[Stamp]) -> bool:
        try:
            handle = libc.open_beneath(self._files.root.fd, path, os.O_PATH | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            status = os.fstat(handle)
        finally:
            os.close(handle)
        latest = max(status.st_mtime_ns, status.st_ctime_ns)
        stamp = (status.st_ino, status.st_ctime_ns)
        return stat.S_ISREG(status.st_mode) and latest >= since and stamp not in given

    # watching

    async def _watch_all(self) -> None:
        try:
            self._inotify = libc.inotify_init()
        except OSError as error:
            self._usable = error.errno in {errno.EMFILE, errno.ENFILE}
            return
        try:
            for number, path in enumerate(self._watch(b".", new=False)):
                if path is None:
                    self.close()
                    self._usable = False
                    return
                if number % _BREATH == _BREATH - 1:
                    await asyncio.sleep(0)
        except BaseException:  # the request was cancelled: an incomplete watch must not be used
            self.close()
            raise

    def _watch(self, top: bytes, *, new: bool) -> Iterator[bytes | None]:
        """Watch a directory and those below. Yields each path, and None when no more can be watched. Files in a `new`
        directory count as changed.
        """
        pending = [top]
        while pending:
            path = pending.pop()
            try:
                handle = libc.open_beneath(self._files.root.fd, path, _DIRECTORY)
            except OSError:
                continue  # gone, or not readable
            try:
                try:
                    watch = libc.inotify_add_watch(self._inotify, f"/proc/self/fd/{handle}".encode(), _MASK)
                except OSError:
                    watch = -1
                if watch < 0 or len(self._paths) >= MOST_WATCHED:
                    yield None
                    return
                self._paths[watch] = path
                self._watches[path] = watch
                with os.scandir(handle) as entries:
                    for entry in entries:
                        below = _join(path, os.fsencode(entry.name))
                        if entry.is_dir(follow_symlinks=False):
                            pending.append(below)
                        elif new:
                            self._note(below)
            except OSError:
                continue
            finally:
                os.close(handle)
            yield path

    def _note(self, path: bytes) -> None:
        self._count += 1
        self._changed[path] = self._count

    def _read_events(self) -> bool:
        """Read the events. Return False when some were lost; then everything is watched again next time."""
        while True:
            try:
                data = os.read(self._inotify, _READ)
            except BlockingIOError:
                return True
            at = 0
            while at < len(data):
                watch, mask, _cookie, size = _HEAD.unpack_from(data, at)
                name = data[at + _HEAD.size : at + _HEAD.size + size].rstrip(b"\0")
                at += _HEAD.size + size
                if mask & _OVERFLOW or not self._event(watch, mask, name):
                    self.close()
                    return False

    def _event(self, watch: int, mask: int, name: bytes) -> bool:
        folder = self._paths.get(watch)
        if folder is None:
            return True
        if mask & _IGNORED:
            del self._paths[watch]
            if self._watches.get(folder) == watch:
                del self._watches[folder]
            return True
        path = _join(folder, name)
        if not mask & _ISDIR:
            if not mask & _MOVED_FROM:
                self._note(path)
        elif mask & _MOVED_FROM:
            self._forget(path)
        elif mask & (_CREATE | _MOVED_TO):
            return None not in list(self._watch(path, new=True))
        return True

    def _forget(self, top: bytes) -> None:
        """Stop watching a directory that was moved: the paths below it have changed."""
        for path in [path for path in self._watches if path == top or path.startswith(top + b"/")]:
            watch = self._watches.pop(path)
            self._paths.pop(watch, None)
            libc.inotify_rm_watch(self._inotify, watch)


def _join(folder: bytes, name: bytes) -> bytes:
    return name if folder == b"." else folder + b"/" + name
