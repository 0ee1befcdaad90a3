"""The environments of a server on its disk: finished ones on a shelf that sandboxes see, drafts beside it.

Whole or not at all: an environment is copied into a draft, checked, and renamed onto the shelf. What it is copied from
is hostile: nothing there is followed, and nothing but plain files, directories and links within it comes along.
Blocking: callers run these functions in a thread. Knows nothing of sandboxes.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from carrel.errors import InvalidRequest, LimitExceeded, PlatformError
from carrel.primitives import libc
from carrel.primitives.trees import empty_directory
from carrel.workspaces.volumes import kernel

MANIFEST = "carrel-env.json"
MOST_FILES = 200_000
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PIECE = 8 << 20
_BLOCK = 4096
_UNLISTED = 0o311


class Shelf:
    """`directory` holds `shelf`, which nobody but root can list, and `drafts`."""

    def __init__(self, directory: str):
        self.directory = directory
        self.path = os.path.join(directory, "shelf")
        self._drafts = os.path.join(directory, "drafts")

    def prepare(self) -> None:
        """Make the directories. Whoever sees the shelf can use what they know the name of, and find nothing else: as an
        ordinary user the owner is also who runs in sandboxes, so the owner cannot list it either.
        """
        try:
            for path, mode in ((self.directory, 0o700), (self._drafts, 0o700), (self.path, _UNLISTED)):
                Path(path).mkdir(mode=mode, parents=True, exist_ok=True)
                os.chmod(path, mode)
        except OSError as error:
            raise PlatformError(f"cannot make {self.directory}: {error.strerror}", field="data_dir") from None

    def close(self) -> None:
        """No sandbox sees the shelf any more: its owner may list it again, or could not remove it either."""
        if os.geteuid() != 0:
            with suppress(OSError):
                os.chmod(self.path, 0o700)

    def has(self, name: str) -> bool:
        """Whether an environment is there."""
        return os.path.isdir(os.path.join(self.path, name))

    def take(self, source: str, python: str, *, most_bytes: int) -> Draft:
        """Copy a tree that was built elsewhere into a draft.

        `python` is the one path outside of the tree that its links may lead to. Raises `InvalidRequest` for what an
        environment cannot have, `LimitExceeded` when it is too large; leaves nothing then.
        """
        path = os.path.join(self._drafts, secrets.token_hex(12))
        os.mkdir(path, 0o700)
        draft = Draft(path)
        try:
            origin = os.open(source, kernel.DIRECTORY)
            target = os.open(path, kernel.DIRECTORY)
            try:
                draft.size = _Copy(python, most_bytes).copy(origin, target)
            finally:
                os.close(origin)
                os.close(target)
        except BaseException:
            self.discard(draft)
            raise
        return draft

    def settle(self, draft: Draft) -> None:
        """Write a draft to the disk. May take long, so nobody has to wait for it but who made the draft."""
        try:
            fd = os.open(draft.path, kernel.DIRECTORY)
            try:
                os.fchmod(fd, 0o755)
                libc.sync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            self.discard(draft)
            raise PlatformError(f"the environment could not be written: {error.strerror}") from None

    def place(self, draft: Draft, name: str) -> None:
        """Put a settled draft onto the shelf, durably; one that is there already stays."""
        try:
            if self.has(name):
                self.discard(draft)
                return
            os.rename(draft.path, os.path.join(self.path, name))
            for path in (self.path, self._drafts):
                self._sync(path)
        except OSError as error:
            self.discard(draft)
            raise PlatformError(f"the environment could not be put in place: {error.strerror}") from None

    def discard(self, draft: Draft) -> None:
        """Remove a draft."""
        _remove(draft.path)

    def retire(self, name: str) -> str | None:
        """Take an environment off the shelf in one step; where it is now, to be removed. None when it was not there."""
        path = os.path.join(self._drafts, f"gone-{secrets.token_hex(12)}")
        try:
            os.rename(os.path.join(self.path, name), path)
        except FileNotFoundError:
            return None
        return path

    def remove(self, path: str) -> None:
        """Remove what `retire` gave."""
        _remove(path)

    def sweep(self, known: Iterable[str]) -> list[str]:
        """After a restart: remove every draft, and what is on the shelf and not known; the known that are there."""
        for name in os.listdir(self._drafts):
            _remove(os.path.join(self._drafts, name))
        wanted = set(known)
        there = set(self._listed())
        for name in there - wanted:
            path = self.retire(name)
            if path is not None:
                _remove(path)
        return sorted(there & wanted)

    def free(self) -> float:
        """Which part of the disk is free, from 0 to 1."""
        facts = os.statvfs(self.directory)
        return facts.f_bavail / facts.f_blocks if facts.f_blocks else 1.0

    def _listed(self) -> list[str]:
        try:
            return os.listdir(self.path)
        except PermissionError:  # its owner may not either: see `prepare`
            os.chmod(self.path, 0o700)
            try:
                return os.listdir(self.path)
            finally:
                os.chmod(self.path, _UNLISTED)

    def _sync(self, path: str) -> None:
        try:
            fd = os.open(path, kernel.DIRECTORY)
        except PermissionError:  # what cannot be listed cannot be opened; its parent can
            fd = os.open(self.directory, kernel.DIRECTORY)
            try:
                libc.sync(fd)
            finally:
                os.close(fd)
            return
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class Draft:
    """An environment that is not on the shelf yet."""

    def __init__(self, path: str):
        self.path = path
        self.size = 0

    def write(self, name: str, content: bytes) -> None:
        """Put a file of carrel's own in, in the place of one that came along."""
        path = os.path.join(self.path, name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)
        fd = os.open(path, _NEW, 0o644)
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            os.fchmod(fd, 0o644)
        self.size += len(content)


class _Copy:
    """One copy: every file with the mode its kind has, times kept (compiled modules know those of their source)."""

    def __init__(self, python: str, most_bytes: int):
        self._python = python
        self._most = most_bytes
        self._size = 0
        self._count = 0

    def copy(self, source: int, target: int) -> int:
        """Copy everything; the bytes on disk it takes."""
        made = kernel.Directories(target)
        times: list[int] = []
        try:
            for visited in kernel.visit(source):
                if visited.path_bytes > kernel.LONGEST_PATH:
                    raise kernel.too_deep(visited.path.split("/"))
                if visited.number:
                    made.add(visited.parent, visited.name)
                here = made.get(visited.number)
                times.append(visited.info.st_mtime_ns)
                path = visited.path
                for name, info in visited.entries:
                    self._entry(visited.fd, path, name, info, here)
            for number in reversed(range(len(times))):
                fd = made.get(number)
                os.fchmod(fd, 0o755)
                os.utime(fd, ns=(times[number], times[number]))
        except OSError as error:
            raise PlatformError(f"the environment could not be copied: {error.strerror}") from None
        finally:
            made.close()
        return self._size

    def _entry(self, fd: int, folder: str, name: str, info: os.stat_result, here: int) -> None:
        shown = f"{folder}/{name}" if folder else name
        kind = stat.S_IFMT(info.st_mode)
        self._count += 1
        self._size += _BLOCK if kind == stat.S_IFDIR else 0
        if kind == stat.S_IFREG:
            self._size += -(-info.st_size // _BLOCK) * _BLOCK
        if self._count > MOST_FILES or self._size > self._most:
            raise LimitExceeded(
                f"the environment has more than {self._most >> 20} MB or {MOST_FILES} files",
                field="requirements",
                hint="ask for less in one environment, or let the operator raise envs.largest_mb",
            )
        if kind == stat.S_IFDIR:
            os.mkdir(name, 0o755, dir_fd=here)
        elif kind == stat.S_IFLNK:
            points_to = os.readlink(name, dir_fd=fd)
            if not self._stays(points_to, folder):
                raise InvalidRequest(
                    f"a package of the environment leaves a link that leads out of it: {shown!r}",
                    field="requirements",
                    hint="leave the package out",
                )
            os.symlink(points_to, name, dir_fd=here)
        elif kind == stat.S_IFREG:
            self._file(name, fd, here)
        else:
            raise InvalidRequest(
                f"a package of the environment leaves something that is no file: {shown!r}",
                field="requirements",
                hint="leave the package out",
            )

    def _stays(self, points_to: str, folder: str) -> bool:
        """Whether a link leads to the interpreter, or to something below the tree whatever other links there are."""
        if points_to == self._python:
            return True
        parts = points_to.split("/")
        up = 0
        while up < len(parts) and parts[up] == "..":
            up += 1
        depth = len(folder.split("/")) if folder else 0
        return not points_to.startswith("/") and up <= depth and ".." not in parts[up:]

    def _file(self, name: str, source: int, here: int) -> None:
        origin = kernel.open_for_reading(name, source)
        try:
            info = os.fstat(origin)
            if not stat.S_ISREG(info.st_mode):
                raise InvalidRequest("a package of the environment changes its files", field="requirements")
            copy = os.open(name, _NEW, 0o600, dir_fd=here)
            try:
                if not libc.clone(origin, copy):
                    self._data(origin, copy, info.st_size)
                os.fchmod(copy, 0o755 if info.st_mode & 0o111 else 0o644)
                os.utime(copy, ns=(info.st_mtime_ns, info.st_mtime_ns))
            finally:
                os.close(copy)
        finally:
            os.close(origin)

    @staticmethod
    def _data(origin: int, copy: int, size: int) -> None:
        at = 0
        while at < size and (data := os.pread(origin, min(_PIECE, size - at), at)):
            view = memoryview(data)
            while view:
                wrote = os.write(copy, view)
                view = view[wrote:]
            at += len(data)


def _remove(path: str) -> None:
    try:
        fd = os.open(path, kernel.DIRECTORY)
    except FileNotFoundError:
        return
    except OSError:
        os.unlink(path)
        return
    try:
        empty_directory(fd)
    finally:
        os.close(fd)
    os.rmdir(path)
