"""The environments of a server on its disk: finished ones in the directory `shelf`, which sandboxes see, and drafts.

An environment is copied into a draft, checked, and renamed into `shelf`, so it appears whole or not at all. The
source is hostile: no link is followed, and only plain files, directories and links within the tree are copied.
Blocking.
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
from carrel.primitives import libc, walk
from carrel.primitives.atomic import sync_directory
from carrel.primitives.trees import remove_tree

MANIFEST = "carrel-env.json"
MOST_FILES = 200_000
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_BLOCK = 4096
_UNLISTED = 0o311


class EnvironmentStorage:
    """The environments below `directory`: in `shelf`, which only root can list, and in `drafts`."""

    def __init__(self, directory: str):
        self.directory = directory
        self.path = os.path.join(directory, "shelf")
        self._drafts = os.path.join(directory, "drafts")

    def prepare(self) -> None:
        """Create the directories. A sandbox sees `shelf` but can use only environments whose names it knows. Not even
        the owner may list it: when carrel runs as an ordinary user, sandboxes run as that user too.
        """
        try:
            for path, mode in ((self.directory, 0o700), (self._drafts, 0o700), (self.path, _UNLISTED)):
                Path(path).mkdir(mode=mode, parents=True, exist_ok=True)
                os.chmod(path, mode)
        except OSError as error:
            raise PlatformError(f"cannot make {self.directory}: {error.strerror}", field="data_dir") from None

    def close(self) -> None:
        """Let the owner list `shelf` again, or he could not remove it. No sandbox may use it any more."""
        if os.geteuid() != 0:
            with suppress(OSError):
                os.chmod(self.path, 0o700)

    def has(self, name: str) -> bool:
        """Return whether an environment exists."""
        return os.path.isdir(os.path.join(self.path, name))

    def take(self, source: str, python: str, *, most_bytes: int) -> EnvironmentDraft:
        """Copy a tree that was built elsewhere into a draft.

        `python` is the only path outside the tree that its links may lead to. Raises `InvalidRequest` for entries that
        an environment cannot have, and `LimitExceeded` when it is too large; both leave nothing.
        """
        path = os.path.join(self._drafts, secrets.token_hex(12))
        os.mkdir(path, 0o700)
        draft = EnvironmentDraft(path)
        try:
            origin = os.open(source, walk.DIRECTORY)
            target = os.open(path, walk.DIRECTORY)
            try:
                draft.size = _Copy(python, most_bytes).copy(origin, target)
            finally:
                os.close(origin)
                os.close(target)
        except BaseException:
            self.discard(draft)
            raise
        return draft

    def sync(self, draft: EnvironmentDraft) -> None:
        """Make a draft durable. This may take long, so it is separate from `place`, for which others wait."""
        try:
            fd = os.open(draft.path, walk.DIRECTORY)
            try:
                os.fchmod(fd, 0o755)
                libc.sync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            self.discard(draft)
            raise PlatformError(f"the environment could not be written: {error.strerror}") from None

    def place(self, draft: EnvironmentDraft, name: str) -> None:
        """Move a synced draft into `shelf`, durably; an environment that exists already stays."""
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

    def discard(self, draft: EnvironmentDraft) -> None:
        """Remove a draft."""
        _remove(draft.path)

    def retire(self, name: str) -> str | None:
        """Move an environment out of `shelf` and return its new path, to be removed. None when there was none."""
        path = os.path.join(self._drafts, f"gone-{secrets.token_hex(12)}")
        try:
            os.rename(os.path.join(self.path, name), path)
        except FileNotFoundError:
            return None
        return path

    def remove(self, path: str) -> None:
        """Remove a retired environment."""
        _remove(path)

    def sweep(self, known: Iterable[str]) -> list[str]:
        """Remove every draft and every unknown environment after a restart; return the known ones that exist."""
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
        """Return the free share of the disk, from 0 to 1."""
        facts = os.statvfs(self.directory)
        return facts.f_bavail / facts.f_blocks if facts.f_blocks else 1.0

    def _listed(self) -> list[str]:
        try:
            return os.listdir(self.path)
        except PermissionError:  # not even the owner may list it: see `prepare`
            os.chmod(self.path, 0o700)
            try:
                return os.listdir(self.path)
            finally:
                os.chmod(self.path, _UNLISTED)

    def _sync(self, path: str) -> None:
        try:
            sync_directory(path)
        except PermissionError:  # a directory that cannot be listed cannot be opened; its parent can
            fd = os.open(self.directory, walk.DIRECTORY)
            try:
                libc.sync(fd)
            finally:
                os.close(fd)


class EnvironmentDraft:
    """An environment that is not stored yet."""

    def __init__(self, path: str):
        self.path = path
        self.size = 0

    def write(self, name: str, content: bytes) -> None:
        """Add a file of carrel, and replace one that the packages brought."""
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
    """One copy. Files get standard modes and keep their times, which compiled modules compare with their source."""

    def __init__(self, python: str, most_bytes: int):
        self._python = python
        self._most = most_bytes
        self._size = 0
        self._count = 0

    def copy(self, source: int, target: int) -> int:
        """Copy everything and return the bytes it takes on the disk."""
        made = walk.Directories(target)
        times: list[int] = []
        try:
            for visited in walk.visit(source):
                if visited.path_bytes > walk.LONGEST_PATH:
                    raise walk.too_deep(visited.path.split("/"))
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
                f"a package of the environment leaves something that is not a file: {shown!r}",
                field="requirements",
                hint="leave the package out",
            )

    def _stays(self, points_to: str, folder: str) -> bool:
        """Return whether a link leads to the interpreter, or stays in the tree whatever other links there are."""
        if points_to == self._python:
            return True
        parts = points_to.split("/")
        up = 0
        while up < len(parts) and parts[up] == "..":
            up += 1
        depth = len(folder.split("/")) if folder else 0
        return not points_to.startswith("/") and up <= depth and ".." not in parts[up:]

    def _file(self, name: str, source: int, here: int) -> None:
        origin = walk.open_for_reading(name, source)
        try:
            info = os.fstat(origin)
            if not stat.S_ISREG(info.st_mode):
                raise InvalidRequest("a package of the environment changes its files", field="requirements")
            copy = os.open(name, _NEW, 0o600, dir_fd=here)
            try:
                walk.copy_content(origin, copy)
                walk.set_attributes(copy, 0o755 if info.st_mode & 0o111 else 0o644, info.st_mtime_ns)
            finally:
                os.close(copy)
        finally:
            os.close(origin)


def _remove(path: str) -> None:
    try:
        remove_tree(path)
    except NotADirectoryError:
        os.unlink(path)
