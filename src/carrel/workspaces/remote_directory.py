"""A remote that is a directory of this machine or of a network file system.

By hand, because the library that speaks to buckets neither syncs files nor keeps them from other users.
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
from carrel.primitives.libc import clone
from carrel.workspaces.remote import Entry, Remote, check_remote_name, missing, reading, writing
from carrel.workspaces.volumes.objects import sync_directory, write_whole

_PIECE = 4 << 20
_ASIDE = ".aside"
_ABANDONED_S = 60.0
_ATTEMPTS, _PAUSE_S = 100, 0.001


class Directory(Remote):
    """Files in folders, each for its owner only, written aside and renamed."""

    def __init__(self, path: str):
        self._root = os.path.normpath(path)
        self.description = self._root

    def put(self, name: str, data: bytes) -> None:
        """Written aside, synced and renamed."""

        def fill(fd: int) -> None:
            write_whole(fd, data)

        self._keep(name, fill)

    def put_file(self, name: str, path: str) -> None:
        """A hard link where there can be one, else a copy."""
        target = self._path(name)
        with reading(path) as source, self._storing():
            if not self._link(source, path, target):
                self._keep(name, lambda fd: _copy(source, fd))

    def _link(self, source: int, path: str, target: str) -> bool:
        """Share the file where it lies on the same file system and the name is free."""
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

    def _keep(self, name: str, fill: Callable[[int], None]) -> None:
        target = self._path(name)
        with self._storing():
            aside = os.path.join(self._aside(), secrets.token_hex(16))
            fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)  # as long as it is held, nobody takes the file for abandoned
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
        """Put something into its folder, durably. Others remove folders that are empty: then once more."""
        folder = os.path.dirname(target)
        for left in reversed(range(_ATTEMPTS)):
            try:
                self._folder(folder)
                act()
                break
            except FileNotFoundError:
                if not left:
                    raise
                time.sleep(_PAUSE_S)  # the kernel may still be at it: until then, the folder is there and takes nothing
        with suppress(FileNotFoundError):  # it was deleted already, and the folder with it
            sync_directory(folder)

    def get(self, name: str) -> bytes:
        """All of it."""
        with self._opened(name) as fd, self._storing():
            return _read(fd, 0, os.fstat(fd).st_size)

    def get_file(self, name: str, path: str) -> None:
        """Shared blocks where the file system has them, else a copy."""
        with self._opened(name) as source, writing(path) as fd:
            if not clone(source, fd):
                _copy(source, fd)

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """Read in place."""
        with self._opened(name) as fd, self._storing():
            return _read(fd, start, length)

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Folder by folder."""
        top = self._path(prefix)
        with self._storing():
            yield from self._beneath(top, check_remote_name(prefix))

    def _beneath(self, folder: str, prefix: str) -> Iterator[Entry]:
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
                yield Entry(f"{prefix}/{name}", info.st_size, info.st_mtime)

    def delete(self, names: Iterable[str]) -> None:
        """Files, and the folders that are empty then."""
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
        with suppress(OSError):  # not empty, or somebody else was first
            while folder != self._root:
                os.rmdir(folder)
                folder = os.path.dirname(folder)

    def _path(self, name: str) -> str:
        return os.path.join(self._root, check_remote_name(name))

    def _folder(self, path: str) -> None:
        """Make a folder and those above it, each for its owner only."""
        if os.path.isdir(path):
            return
        parent = os.path.dirname(path)
        self._folder(parent)
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
            sync_directory(parent)

    def _aside(self) -> str:
        """Where files are written before they have a name; what a killed process left there is removed."""
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
                hint="see that the directory is there, is ours and has room",
                errno=error.errno,
            ) from error


def _copy(source: int, target: int) -> None:
    at = 0
    while piece := os.pread(source, _PIECE, at):
        write_whole(target, piece)
        at += len(piece)


def _read(fd: int, start: int, length: int) -> bytes:
    pieces = []
    while length > 0 and (piece := os.pread(fd, min(length, _PIECE), start)):
        pieces.append(piece)
        start += len(piece)
        length -= len(piece)
    return b"".join(pieces)
