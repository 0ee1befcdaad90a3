"""Remote storage of named bytes: a directory or a bucket.

Synchronous, for many threads. A name appears with all its bytes or not at all.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from carrel.errors import InvalidRequest, NotFound, PlatformError

SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+:=@-]{0,250}")
"""A component of a name, between slashes."""

_LONGEST_NAME = 800


@dataclass(frozen=True, slots=True)
class RemoteEntry:
    """One name in a listing; `modified` is seconds since 1970 by the remote's own clock."""

    name: str
    size: int
    modified: float


class Remote(ABC):
    """Named bytes. A name is one or more plain file names joined by `/`; anything else is `InvalidRequest`.

    Storage that is unreachable, full or refuses access raises `ArchiveUnavailable`, after a few seconds at most.
    """

    description: str
    """Text for people, without secrets."""

    @classmethod
    def open(cls, url: str) -> Remote:
        """Open the remote at an absolute path or an `s3://` URL. Makes no network request yet."""
        if url.startswith("s3://"):
            from carrel.workspaces.remote_bucket import Bucket

            return Bucket(url)
        if url.startswith("/") and "\0" not in url:
            from carrel.workspaces.remote_directory import RemoteDirectory

            return RemoteDirectory(url)
        raise bad_url("it is neither an absolute path nor a URL that starts with s3://")

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Store bytes under a name, or replace those stored before."""

    @abstractmethod
    def put_file(self, name: str, path: str) -> None:
        """Store a file's content in pieces. The file must never be changed again: it may be linked."""

    @abstractmethod
    def get(self, name: str) -> bytes:
        """Return the bytes of a name; `NotFound`."""

    @abstractmethod
    def get_file(self, name: str, path: str) -> None:
        """Write the bytes of a name into a new file in pieces; `NotFound`. A failure leaves no partial file."""

    @abstractmethod
    def get_range(self, name: str, start: int, length: int) -> bytes:
        """Return a range of the bytes, shorter at the end; `NotFound`."""

    @abstractmethod
    def entries(self, prefix: str) -> Iterator[RemoteEntry]:
        """Yield everything below `prefix`, which has no `/` at its end, sorted by name."""

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the names of `entries`."""
        return (entry.name for entry in self.entries(prefix))

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Remove names if they exist."""


def check_remote_name(name: str) -> str:
    """Check that a name cannot lead to another place, and return it."""
    if len(name) > _LONGEST_NAME or not all(SEGMENT.fullmatch(part) for part in name.split("/")):
        raise InvalidRequest(
            f"{name[:80]!r} cannot be a name in the archive",
            field="name",
            hint="use letters, digits and . _ + : = @ -, in parts joined by /, no part starting with a sign",
        )
    return name


def bad_url(why: str) -> InvalidRequest:
    """Return the error for an invalid URL. It does not quote the URL, which may hold a password."""
    return InvalidRequest(
        f"the archive's URL cannot be used: {why}",
        field="archive",
        hint="write /path or s3://bucket/prefix?endpoint=https://host&region=name",
    )


def missing(name: str) -> NotFound:
    """Return the error for a missing name."""
    return NotFound(f"the archive has no {name!r}", field="name")


@contextmanager
def reading(path: str) -> Iterator[int]:
    """Open a local file for reading."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise PlatformError(f"a file for the archive cannot be read: {error.strerror}", errno=error.errno) from error
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def writing(path: str) -> Iterator[int]:
    """Create a local file, which is removed again when the block fails."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            yield fd
        except BaseException:
            with suppress(OSError):
                os.unlink(path)
            raise
        finally:
            os.close(fd)
    except OSError as error:
        raise PlatformError(
            f"a file from the archive cannot be written: {error.strerror}", errno=error.errno
        ) from error
