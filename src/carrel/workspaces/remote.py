"""A place for named bytes beyond this machine's volumes: a directory or a bucket.

Synchronous; may be used from many threads. What is put is there whole or not at all. Knows nothing of what the bytes
mean.
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
"""A part of a name, between slashes."""

_LONGEST_NAME = 800


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a listing; `modified` is seconds since 1970 by the remote's own clock."""

    name: str
    size: int
    modified: float


class Remote(ABC):
    """Named bytes. A name is one or more plain file names joined by `/`; anything else is `InvalidRequest`.

    Storage that cannot be reached, refuses or is full raises `ArchiveUnavailable`, after a few seconds at most.
    """

    description: str
    """For people; holds no secret."""

    @classmethod
    def open(cls, url: str) -> Remote:
        """The remote at an absolute path or an `s3://` URL. Nothing is asked of the network yet."""
        if url.startswith("s3://"):
            from carrel.workspaces.remote_bucket import Bucket

            return Bucket(url)
        if url.startswith("/") and "\0" not in url:
            from carrel.workspaces.remote_directory import Directory

            return Directory(url)
        raise bad_url("it is neither an absolute path nor a URL that starts with s3://")

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Keep bytes under a name; replaces what was there."""

    @abstractmethod
    def put_file(self, name: str, path: str) -> None:
        """Keep a file's content, piece by piece. The file must never be written to again: it may be shared."""

    @abstractmethod
    def get(self, name: str) -> bytes:
        """The bytes of that name; `NotFound`."""

    @abstractmethod
    def get_file(self, name: str, path: str) -> None:
        """Write the bytes of that name into a new file, piece by piece; `NotFound`. No part of it stays on failure."""

    @abstractmethod
    def get_range(self, name: str, start: int, length: int) -> bytes:
        """Some of the bytes, fewer where there are no more; `NotFound`."""

    @abstractmethod
    def entries(self, prefix: str) -> Iterator[Entry]:
        """Everything beneath `prefix`, which ends where a `/` would follow; sorted by name."""

    def list(self, prefix: str) -> Iterator[str]:
        """The names of `entries`."""
        return (entry.name for entry in self.entries(prefix))

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Remove names; those that are not there are fine."""


def check_remote_name(name: str) -> str:
    """Refuse a name that could mean another place."""
    if len(name) > _LONGEST_NAME or not all(SEGMENT.fullmatch(part) for part in name.split("/")):
        raise InvalidRequest(
            f"{name[:80]!r} cannot be a name in the archive",
            field="name",
            hint="use letters, digits and . _ + : = @ -, in parts joined by /, no part starting with a sign",
        )
    return name


def bad_url(why: str) -> InvalidRequest:
    """The error for a URL that cannot be used."""
    # Nothing of the URL is quoted: it may hold a password.
    return InvalidRequest(
        f"the archive's URL cannot be used: {why}",
        field="archive",
        hint="write /path or s3://bucket/prefix?endpoint=https://host&region=name",
    )


def missing(name: str) -> NotFound:
    """The error for a name that is not there."""
    return NotFound(f"the archive has no {name!r}", field="name")


@contextmanager
def reading(path: str) -> Iterator[int]:
    """A file of this machine, open."""
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
    """A new file of this machine, which is removed again when the block fails."""
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
            f"what the archive holds cannot be written here: {error.strerror}", errno=error.errno
        ) from error
