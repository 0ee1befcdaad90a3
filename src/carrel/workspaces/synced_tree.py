"""Reads and writes the files of a workspace for a sync, while hostile code may be changing them.

No link is followed and nothing outside the tree is touched: every path is opened component by component. A file is
written aside and renamed into place.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from blake3 import blake3

from carrel.errors import LimitExceeded, PlatformError
from carrel.primitives import libc, walk
from carrel.primitives.atomic import draft, write_all
from carrel.workspaces.filespace import NOT_SYNCED, UNSURE, BaseRow, Content, FileStat, LocalFile
from carrel.workspaces.layout import CANONICAL_UID
from carrel.workspaces.volumes.capture import FRESH_NS

MOST_FILES = 250_000
PIECE = 4 << 20
_TRIES = 3
_ASIDE = ".carrel-sync-"
_TEMPORARY = re.compile(
    r"\.(?:carrel-sync-[0-9a-f]{16}|carrel-[0-9a-f]{32}|carrel-draft(?:-[0-9a-f]{32})?|context\.json\.new)"
)
_FULL = {errno.ENOSPC, errno.EDQUOT}
_IN_THE_WAY = {errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.EXDEV, errno.EISDIR}
_NOTHING = Content("", 0)


class Taken(Protocol):
    """The hash and the number of the bytes read from a file."""

    @property
    def hash(self) -> str: ...  # noqa: D102
    @property
    def size(self) -> int: ...  # noqa: D102


T = TypeVar("T", bound=Taken)


class Obstructed(Exception):
    """The path of a file is occupied by something that a sync must not remove."""


@dataclass(frozen=True, slots=True)
class Hashed:
    """A file that was read for its hash."""

    hash: str
    size: int


@dataclass(slots=True)
class Scan:
    """The content of a workspace: the synced files, the number of entries that are not synced, and the bytes of all.

    Files in `unread` may have changed; `SyncedTree.read` moves them to `files`.
    """

    files: dict[str, LocalFile] = field(default_factory=dict)
    unread: dict[str, LocalFile] = field(default_factory=dict)
    skipped: int = 0
    allocated: int = 0
    apparent: int = 0


def hashed(fd: int, size: int) -> Hashed:
    """Hash at most `size` bytes of an open file."""
    hasher = blake3()
    count = 0
    for piece in pieces(fd, size):
        hasher.update(piece)
        count += len(piece)
    return Hashed(hasher.hexdigest(), count)


def pieces(fd: int, size: int) -> Iterator[bytes]:
    """Yield at most `size` bytes of an open file, in pieces."""
    at = 0
    while at < size and (data := os.pread(fd, min(PIECE, size - at), at)):
        yield data
        at += len(data)


def facts_of(info: os.stat_result) -> FileStat:
    """Return the facts in a stat result."""
    return FileStat(info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


class SyncedTree:
    """The tree below one directory, in which no file may have more than `most_bytes`. Close it when done."""

    def __init__(self, path: str, most_bytes: int | None = None):
        try:
            self._root = os.open(path, walk.DIRECTORY)
        except OSError as error:
            raise PlatformError(f"the workspace cannot be opened: {error.strerror}") from None
        self._most_bytes = most_bytes
        self._device = os.fstat(self._root).st_dev
        self._owner = CANONICAL_UID if os.geteuid() == 0 else None

    def close(self) -> None:
        """Release the directory."""
        os.close(self._root)

    # reading

    def scan(self, rows: Mapping[str, BaseRow]) -> Scan:
        """List every synced file. Reads none: files that differ from the facts in `rows` are left for `read`.

        Files nested so deep that no path can name them are not synced, and counted in `skipped`.
        """
        found = Scan()
        linked: set[int] = set()
        try:
            for visited in walk.visit(self._root):
                nested = visited.path_bytes > walk.LONGEST_PATH
                path = "" if nested else visited.path
                kept = not nested and NOT_SYNCED.isdisjoint(path.split("/"))
                found.skipped += len(visited.entries) if nested else 0
                prefix = f"{path}/" if path else ""
                for name, info in visited.entries:
                    if info.st_nlink == 1 or stat.S_ISDIR(info.st_mode) or info.st_ino not in linked:
                        found.allocated += info.st_blocks * 512
                        linked.add(info.st_ino) if info.st_nlink > 1 else None
                    if kept and name not in NOT_SYNCED:
                        self._look(visited.fd, name, info, prefix + name, rows.get(prefix + name), found)
        except OSError as error:
            raise PlatformError(f"the workspace cannot be read: {error.strerror}") from None
        return found

    def _look(self, fd: int, name: str, info: os.stat_result, path: str, row: BaseRow | None, found: Scan) -> None:
        if not stat.S_ISREG(info.st_mode):
            found.skipped += not stat.S_ISDIR(info.st_mode)
            return
        if name.startswith(".c") and _TEMPORARY.fullmatch(name):
            if name.startswith(_ASIDE):  # from a killed sync
                with suppress(OSError):
                    os.unlink(name, dir_fd=fd)
            return
        facts = facts_of(info)
        if len(found.files) + len(found.unread) >= MOST_FILES:
            raise LimitExceeded(
                f"the workspace has more than {MOST_FILES} files",
                field="files",
                hint=f"delete some, or keep them in one of {', '.join(sorted(NOT_SYNCED))}, which are not synced",
            )
        found.apparent += facts.size
        local = LocalFile(
            row.content if row is not None and row.placed else _NOTHING, facts, facts, info.st_blocks * 512
        )
        if row is not None and row.placed and row.facts == facts:
            found.files[path] = local
        else:
            found.unread[path] = local

    def read(self, found: Scan) -> int:
        """Read the files that a scan left unread, and return how many."""
        count = len(found.unread)
        for path, seen in found.unread.items():
            try:
                taken = self._take(path, hashed)
            except PermissionError:  # the file exists, but whether it changed is unknown
                found.skipped += 1
                if seen.content is not _NOTHING:
                    found.files[path] = seen._replace(known=UNSURE)
                continue
            if taken is not None:
                found.files[path] = taken[1]._replace(allocated=seen.allocated)
        found.unread.clear()
        return count

    def take(self, path: str, read: Callable[[int, int], T]) -> tuple[T, LocalFile] | None:
        """Read one file with `read`, which gets the open file and its size; None when the file is gone."""
        try:
            return self._take(path, read)
        except PermissionError:
            return None

    def _take(self, path: str, read: Callable[[int, int], T]) -> tuple[T, LocalFile] | None:
        head, _, name = path.rpartition("/")
        try:
            with self._directory(head) as parent:
                return self._stable(parent, name, read)
        except PermissionError:
            raise
        except (FileNotFoundError, Obstructed):
            return None
        except OSError as error:
            raise PlatformError(f"{path!r} cannot be read: {error.strerror}") from None

    def _stable(self, parent: int, name: str, read: Callable[[int, int], T]) -> tuple[T, LocalFile] | None:
        """Read a file again if it changes meanwhile, a bounded number of times; the last reading counts."""
        try:
            fd = walk.open_for_reading(name, parent)
        except OSError as error:
            if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO}:
                return None  # removed or replaced meanwhile
            raise
        try:
            for left in reversed(range(_TRIES)):
                before = os.fstat(fd)
                if not stat.S_ISREG(before.st_mode):
                    return None
                if self._most_bytes is not None and before.st_size > self._most_bytes:
                    raise LimitExceeded(
                        f"a file of the workspace has {before.st_size} bytes; the limit is {self._most_bytes}",
                        field="disk_mb",
                        hint="delete it, then sync again",
                    )
                now = time.time_ns()
                taken = read(fd, before.st_size)
                after = os.fstat(fd)
                unchanged = facts_of(before) == facts_of(after)
                if unchanged or not left:
                    facts = facts_of(after)._replace(size=taken.size)
                    content = Content(taken.hash, stat.S_IMODE(after.st_mode) & 0o777)
                    sure = unchanged and now - before.st_ctime_ns > FRESH_NS
                    return taken, LocalFile(content, facts, facts if sure else UNSURE)
        finally:
            os.close(fd)
        return None

    def gone(self, path: str) -> bool:
        """Return whether there is no file at a path. (A walk may miss one that is moved meanwhile.)"""
        head, _, name = path.rpartition("/")
        try:
            with self._directory(head) as parent:
                return not stat.S_ISREG(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
        except (FileNotFoundError, Obstructed):
            return True
        except OSError as error:
            raise PlatformError(f"{path!r} cannot be read: {error.strerror}") from None

    # writing

    def write(self, path: str, mode: int, content: Iterable[bytes], over: LocalFile | None) -> bool:
        """Write a file, with its directories, and return whether it replaced exactly the file `over`.

        `Obstructed` when something else than a file has its name, or something else than a directory is above it.
        """
        head, _, name = path.rpartition("/")
        aside = f"{_ASIDE}{secrets.token_hex(8)}"
        try:
            with self._directory(head, make=True) as parent, draft(name, aside=aside, dir_fd=parent) as fd:
                for piece in content:
                    write_all(fd, piece)
                if self._owner is not None:
                    os.fchown(fd, self._owner, self._owner)
                os.fchmod(fd, mode)
                return self._clear(parent, name, over)
        except OSError as error:
            raise _write_error(error, path) from None

    def _clear(self, parent: int, name: str, over: LocalFile | None) -> bool:
        """Make room for a file: only a file or empty directories are removed. Return whether `over` was there."""
        try:
            info = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return over is None
        if stat.S_ISDIR(info.st_mode):
            self._remove_empty(parent, name)
            return over is None
        if not stat.S_ISREG(info.st_mode):
            raise Obstructed
        return over is not None and over.facts == facts_of(info)

    def _remove_empty(self, parent: int, name: str) -> None:
        top = walk.open_for_reading(name, parent, walk.DIRECTORY)
        try:
            found: list[tuple[int, str]] = []
            beneath = 0
            for visited in walk.visit(top):
                found.append((visited.parent, visited.name))
                beneath += len(visited.entries)
            if beneath != len(found) - 1:  # some entry is not a directory
                raise Obstructed
            directories = walk.Directories(top)
            try:
                for place in found[1:]:
                    directories.add(*place)
                for above, last in reversed(found[1:]):
                    os.rmdir(last, dir_fd=directories.get(above))
            finally:
                directories.close()
        finally:
            os.close(top)
        os.rmdir(name, dir_fd=parent)

    def remove(self, path: str, expected: LocalFile) -> bool:
        """Delete a file if it did not change; return whether it is gone."""
        head, _, name = path.rpartition("/")
        try:
            with self._directory(head) as parent:
                info = os.stat(name, dir_fd=parent, follow_symlinks=False)
                if not stat.S_ISREG(info.st_mode) or facts_of(info) != expected.facts:
                    return False
                os.unlink(name, dir_fd=parent)
        except FileNotFoundError:
            return True
        except Obstructed:
            return True  # a parent is not a directory any more, so the file is gone
        except OSError as error:
            if error.errno in _IN_THE_WAY:
                return False
            raise PlatformError(f"{path!r} cannot be deleted: {error.strerror}") from None
        return True

    def flush(self) -> None:
        """Make all written files durable."""
        try:
            libc.sync(self._root)
        except OSError as error:
            raise PlatformError(f"the workspace cannot be written: {error.strerror}") from None

    @contextmanager
    def _directory(self, path: str, *, make: bool = False) -> Iterator[int]:
        """Open a directory of the tree; with `make`, missing directories are created."""
        fd = os.dup(self._root)
        try:
            for name in path.split("/") if path else ():
                child = self._child(fd, name, make)
                os.close(fd)
                fd = child
                if os.fstat(fd).st_dev != self._device:
                    raise Obstructed
            yield fd
        finally:
            os.close(fd)

    def _child(self, parent: int, name: str, make: bool) -> int:
        try:
            try:
                return walk.open_for_reading(name, parent, walk.DIRECTORY)
            except FileNotFoundError:
                if not make:
                    raise
            with suppress(FileExistsError):
                os.mkdir(name, 0o755, dir_fd=parent)
                if self._owner is not None:
                    os.chown(name, self._owner, self._owner, dir_fd=parent, follow_symlinks=False)
            return walk.open_for_reading(name, parent, walk.DIRECTORY)
        except OSError as error:
            if error.errno in _IN_THE_WAY:
                raise Obstructed from None
            raise


def _write_error(error: OSError, path: str) -> Exception:
    if error.errno in _IN_THE_WAY or error.errno == errno.ENOTEMPTY:
        return Obstructed()
    if error.errno in _FULL:
        return LimitExceeded(
            "the workspace is full", field="disk_mb", hint="delete files there or in the filespace, then sync again"
        )
    return PlatformError(f"{path!r} cannot be written: {error.strerror}")
