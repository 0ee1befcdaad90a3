"""Resolves a caller's path to an open descriptor beneath the workspace root.

The text of a path is only normalized here; the kernel decides whether it stays inside, never a comparison of strings.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from carrel.errors import (
    AlreadyExists,
    CarrelError,
    Conflict,
    FileMissing,
    InvalidPath,
    LimitExceeded,
    PlatformError,
    Unsupported,
)
from carrel.primitives.libc import open_beneath

PATH_LIMIT = 4095
_LINKS = 40
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_SHOWN = 200

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_BUSY = {errno.EBUSY, errno.ETXTBSY, errno.EAGAIN, errno.ESTALE}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


def text(raw: bytes) -> str:
    """Return a name as text for JSON: bytes that are not UTF-8 become surrogate escapes."""
    return raw.decode("utf-8", "surrogateescape")


def _leaves(shown: str, field: str) -> InvalidPath:
    hint = "name something inside the workspace; symlinks on the way must be relative and stay inside too"
    return InvalidPath(f"{shown} leaves the workspace", field=field, hint=hint)


def refusal(error: OSError, path: str | bytes, field: str = "path") -> CarrelError:
    """Return the error for the caller after a failed system call on `path`."""
    shown = repr((text(path) if isinstance(path, bytes) else path)[:_SHOWN])
    code = error.errno or 0
    answers: dict[int, CarrelError] = {
        errno.ENOENT: FileMissing(f"there is no {shown} in the workspace", field=field),
        errno.EXDEV: _leaves(shown, field),
        errno.ELOOP: InvalidPath(f"{shown} goes through too many or forbidden symlinks", field=field),
        errno.ENOTDIR: InvalidPath(f"a part of {shown} is not a directory", field=field),
        errno.EISDIR: InvalidPath(f"{shown} is a directory", field=field),
        errno.ENAMETOOLONG: InvalidPath(f"a name in {shown} is too long", field=field),
        errno.EINVAL: InvalidPath(f"{shown} cannot be used here", field=field),
        errno.ENXIO: InvalidPath(f"{shown} is not a regular file", field=field),
        errno.ENODEV: InvalidPath(f"{shown} is not a regular file", field=field),
        errno.EEXIST: AlreadyExists(f"{shown} exists already", field=field),
        errno.ENOTEMPTY: Conflict(f"the directory {shown} is not empty", field=field),
        errno.ENOSYS: Unsupported(f"the kernel lacks a call that {shown} needs: {error.strerror}"),
    }
    if code in answers:
        return answers[code]
    if code in _FULL:
        hint = "delete files that are no longer needed"
        return LimitExceeded(f"no room in the workspace for {shown}", field=field, hint=hint)
    if code in _BUSY:
        hint = "try again when nothing else works on it; what has something hidden or read-only in it stays where it is"
        return Conflict(f"{shown} is in use or keeps changing", field=field, hint=hint)
    if code in _FORBIDDEN:
        hint = "change the mode of the file or of its directory first"
        return Conflict(f"the permissions of {shown} do not allow this", field=field, hint=hint)
    if code in {errno.EMFILE, errno.ENFILE, errno.ENOMEM}:
        return LimitExceeded(f"too much is open in the sandbox to work on {shown}", hint="end some commands")
    return PlatformError(f"the file system failed on {shown}: {error.strerror or error}")


@contextmanager
def refusing(path: str | bytes, field: str = "path") -> Iterator[None]:
    """Turn an `OSError` of the block into an error for the caller, except for a lost connection."""
    try:
        yield
    except ConnectionError:
        raise
    except OSError as error:
        raise refusal(error, path, field) from None


class DirectoryEntry:
    """A name in an open directory, for creating, renaming and removing. Use it in a `with`."""

    __slots__ = ("directory", "field", "name", "path")

    def __init__(self, directory: int, name: bytes, path: bytes, field: str):
        self.directory = directory
        self.name = name
        self.path = path
        self.field = field

    def close(self) -> None:
        if self.directory >= 0:
            os.close(self.directory)
            self.directory = -1

    def __enter__(self) -> DirectoryEntry:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Root:
    """The workspace root: an open directory beneath which every path of a caller is resolved."""

    def __init__(self, path: str, also: str = ""):
        """`also` is a second path of the same directory, which callers may use."""
        if not path.startswith("/"):
            raise InvalidPath(f"the workspace root must be absolute, not {path!r}", field="root")
        self._prefix, self._also = path.rstrip("/"), also.rstrip("/")
        try:
            self.fd = os.open(path, _DIRECTORY)
        except OSError as error:
            raise PlatformError(f"the workspace root {path!r} cannot be opened: {error.strerror}") from None

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def holds(self, path: str) -> bool:
        """Whether an absolute path is written as one of this root."""
        return path == self._prefix or path.startswith(self._prefix + "/")

    def relative(self, path: str, field: str = "path") -> bytes:
        """Return the path relative to the root, normalized: `.`, or names and `..` separated by single slashes."""
        shown = repr(path[:_SHOWN])
        if not path:
            raise InvalidPath("the path is empty", field=field, hint="'.' is the workspace itself")
        if "\0" in path:
            raise InvalidPath(f"{shown} contains a NUL", field=field)
        if path.startswith("/"):
            if self._also and (path == self._also or path.startswith(self._also + "/")):
                path = self._prefix + path[len(self._also) :]
            if not self.holds(path):
                hint = f"use a path relative to the workspace, or one that starts with {self._prefix}/"
                raise InvalidPath(f"{shown} is not in the workspace", field=field, hint=hint)
            path = path[len(self._prefix) + 1 :] or "."
        try:
            raw = path.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise InvalidPath(f"{shown} cannot be a file name", field=field) from None
        if len(raw) > PATH_LIMIT:
            raise InvalidPath(f"the path is longer than {PATH_LIMIT} bytes", field=field)
        parts = raw.removesuffix(b"/").split(b"/")
        if b"" in parts:
            raise InvalidPath(f"{shown} has an empty component", field=field, hint="write single slashes")
        return _joined(parts)

    def open(self, relative: bytes, flags: int, field: str = "path") -> int:
        """Open a path; the kernel resolves it beneath the root."""
        with refusing(relative, field):
            return open_beneath(self.fd, relative, flags)

    def place(self, relative: bytes, field: str = "path", *, parents: bool = False) -> DirectoryEntry:
        """The directory and the name of a path; the name itself is not followed and need not exist."""
        above, _, name = relative.rpartition(b"/")
        if name in {b".", b".."}:
            hint = "the workspace itself cannot be replaced, moved or deleted"
            raise InvalidPath(f"{text(relative)!r} must end in a name", field=field, hint=hint)
        if parents and above:
            directory = self.make_directory(above, field)
        else:
            directory = self.open(above or b".", _DIRECTORY, field)
        return DirectoryEntry(directory, name, relative, field)

    def target(self, relative: bytes, field: str = "path", *, parents: bool = False) -> DirectoryEntry:
        """Like `place`, but if the path is a symlink, return the place that it points to beneath the root."""
        current = relative
        for _ in range(_LINKS):
            place = self.place(current, field, parents=parents and current is relative)
            try:
                link = os.readlink(place.name, dir_fd=place.directory)
            except OSError as error:
                if error.errno in {errno.EINVAL, errno.ENOENT}:
                    return place
                place.close()
                raise refusal(error, relative, field) from None
            place.close()
            if link.startswith(b"/"):
                raise _leaves(repr(text(relative)[:_SHOWN]), field)
            # `..` is kept: after a name that may be a symlink, only the kernel knows what it means.
            above = current.rpartition(b"/")[0]
            current = _joined([*above.split(b"/"), *link.split(b"/")])
            if len(current) > PATH_LIMIT:
                break
        raise refusal(OSError(errno.ELOOP, "too many symlinks"), relative, field)

    def make_directory(self, relative: bytes, field: str = "path") -> int:
        """Open the directory at that path; it and those above it are created if they are missing."""
        try:
            return open_beneath(self.fd, relative, _DIRECTORY)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise refusal(error, relative, field) from None
        parts = relative.split(b"/")
        here = self.open(b".", _DIRECTORY, field)
        try:
            with refusing(relative, field):
                for depth, name in enumerate(parts, 1):
                    prefix = b"/".join(parts[:depth])
                    try:
                        below = open_beneath(self.fd, prefix, _DIRECTORY)
                    except FileNotFoundError:
                        try:
                            os.mkdir(name, 0o755, dir_fd=here)
                        except FileExistsError:
                            pass  # created meanwhile, or a dangling symlink: opening it again shows which
                        below = open_beneath(self.fd, prefix, _DIRECTORY)
                    os.close(here)
                    here = below
        except BaseException:
            os.close(here)
            raise
        return here


def _joined(parts: list[bytes]) -> bytes:
    return b"/".join([part for part in parts if part not in {b"", b"."}]) or b"."
