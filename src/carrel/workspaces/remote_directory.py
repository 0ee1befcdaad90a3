"""A remote that is a directory of this machine or of a network file system.

Own code, because the library for buckets neither syncs files nor makes them private.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from carrel.errors import ArchiveUnavailable
from carrel.primitives import walk
from carrel.primitives.atomic import sync_directory, write_all
from carrel.workspaces.remote import Remote, RemoteEntry, check_remote_name, missing, reading, writing

_PIECE = 4 << 20
_ASIDE = ".aside"
_ABANDONED_S = 60.0
_ATTEMPTS, _PAUSE_S = 100, 0.001


class RemoteDirectory(Remote):
    """Files in folders, accessible to the owner only, written aside and renamed."""

    def __init__(self, path: str):
        self._root = os.path.normpath(path)
        self.description = self._root

    def put(self, name: str, data: bytes) -> None:
        """Write aside, sync and rename."""
        self._store(name, lambda fd: write_all(fd, data))

    def put_file(self, name: str, path: str) -> None:
        """Make a hard link where possible, else a copy."""
        target = self._path(name)
        with reading(path) as source, self._storing():
            if not self._link(source, path, target):
                self._store(name, lambda fd: walk.copy_content(source, fd))

    def _link(self, source: int, path: str, target: str) -> bool:
        """Link the file if it is on the same file system and the name is free."""
        try:
            os.fchmod(source, 0o600)
            os.fsync(source)
            self._into_folder(target, lambda: os.link(path, target))
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno in {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EEXIST, errno.EOPNOTSUPP}:
                return False
            raise
        return True

    def _store(self, name: str, fill: Callable[[int], None]) -> None:
        target = self._path(name)
        with self._storing():
            aside = os.path.join(self._aside(), secrets.token_hex(16))
            fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)  # marks the file as in use: `_aside` removes abandoned ones
                fill(fd)
                os.fsync(fd)
                self._into_folder(target, lambda: os.rename(aside, target))
            except BaseException:
                with suppress(OSError):
                    os.unlink(aside)
                raise
            finally:
                os.close(fd)

    def _into_folder(self, target: str, act: Callable[[], None]) -> None:
        """Rename or link a file into its folder, durably. Tries again when another process removes the empty folder."""
        folder = os.path.dirname(target)
        for left in reversed(range(_ATTEMPTS)):
            try:
                self._folder(folder)
                act()
                break
            except FileNotFoundError:
                if not left:
                    raise
                time.sleep(_PAUSE_S)  # while the kernel removes a folder, it exists but accepts no file
        with suppress(FileNotFoundError):  # the file was deleted already, and the folder with it
            sync_directory(folder)

    def get(self, name: str) -> bytes:
        """Return all bytes."""
        with self._opened(name) as fd, self._storing():
            return _read(fd, 0, os.fstat(fd).st_size)

    def get_file(self, name: str, path: str) -> None:
        """Share blocks where the file system can, else copy."""
        with self._opened(name) as source, writing(path) as fd:
            walk.copy_content(source, fd)

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """Read a part of the file."""
        with self._opened(name) as fd, self._storing():
            return _read(fd, start, length)

    def entries(self, prefix: str) -> Iterator[RemoteEntry]:
        """List folder by folder."""
        top = self._path(prefix)
        with self._storing():
            yield from self._beneath(top, check_remote_name(prefix))

    def _beneath(self, folder: str, prefix: str) -> Iterator[RemoteEntry]:
        try:
            names = sorted(os.listdir(folder))
        except FileNotFoundError:
            return
        for name in names:
            path = os.path.join(folder, name)
            if os.path.isdir(path):
                yield from self._beneath(path, f"{prefix}/{name}")
                continue
            with suppress(FileNotFoundError):
                info = os.stat(path)
                yield RemoteEntry(f"{prefix}/{name}", info.st_size, info.st_mtime)

    def delete(self, names: Iterable[str]) -> None:
        """Remove files, and folders that become empty."""
        folders = set()
        with self._storing():
            for path in [self._path(name) for name in names]:
                with suppress(FileNotFoundError):
                    os.unlink(path)
                    folders.add(os.path.dirname(path))
            for folder in folders:
                with suppress(FileNotFoundError):
                    sync_directory(folder)
            for folder in folders:
                self._prune(folder)

    def _prune(self, folder: str) -> None:
        with suppress(OSError):  # not empty, or removed by another process
            while folder != self._root:
                os.rmdir(folder)
                folder = os.path.dirname(folder)

    def _path(self, name: str) -> str:
        return os.path.join(self._root, check_remote_name(name))

    def _folder(self, path: str) -> None:
        """Create a folder and those above it, accessible to the owner only."""
        if os.path.isdir(path):
            return
        parent = os.path.dirname(path)
        self._folder(parent)
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
            sync_directory(parent)

    def _aside(self) -> str:
        """Return the folder for unfinished files, after removing those of killed processes."""
        folder = os.path.join(self._root, _ASIDE)
        self._folder(folder)
        for name in os.listdir(folder):
            with suppress(OSError):
                path = os.path.join(folder, name)
                if time.time() - os.stat(path).st_mtime < _ABANDONED_S:
                    continue
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path)
                finally:
                    os.close(fd)
        return folder

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        path = self._path(name)
        with self._storing():
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise missing(name) from None
        try:
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def _storing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ArchiveUnavailable(
                f"the archive at {self.description} cannot be used: {error.strerror or error}",
                hint="check that the directory exists, belongs to carrel's user and has room",
                errno=error.errno,
            ) from error


def _read(fd: int, start: int, length: int) -> bytes:
    pieces = []
    while length > 0 and (piece := os.pread(fd, min(length, _PIECE), start)):
        pieces.append(piece)
        start += len(piece)
        length -= len(piece)
    return b"".join(pieces)
