"""A place for named bytes beyond this machine's volumes: a directory or a bucket.

Synchronous; may be used from many threads. What is put is there whole or not at all. Knows nothing of what the bytes
mean. A bucket is spoken to by a library; a directory by hand, because the library neither syncs files nor keeps them
from other users.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import parse_qsl, urlsplit

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import S3Store

from carrel.errors import ArchiveUnavailable, InvalidRequest, NotFound, PlatformError
from carrel.workspaces.volumes.kernel import clone
from carrel.workspaces.volumes.objects import sync_directory, write_whole

_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+:=@-]{0,250}")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_CODE = re.compile(r"<Code>([A-Za-z]{1,64})</Code>")
_REFUSALS = {"AccessDenied", "ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch"}
_LONGEST_NAME = 800
_PART = 5 << 20
_PARTS_AT_ONCE = 4
_PIECE = 4 << 20
_ASIDE = ".aside"
_ABANDONED_S = 60.0
_OPTIONS = {"endpoint", "region", "virtual_hosted"}
_CREDENTIALS = (
    ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    ("AWS_WEB_IDENTITY_TOKEN_FILE",),
    ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",),
    ("AWS_CONTAINER_CREDENTIALS_FULL_URI",),
    ("AWS_SKIP_SIGNATURE",),
)


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
            return _Bucket(url)
        if url.startswith("/") and "\0" not in url:
            return _Directory(url)
        raise _bad_url("it is neither an absolute path nor a URL that starts with s3://")

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
    def size(self, name: str) -> int | None:
        """How many bytes there are; None when there is no such name."""

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
    if len(name) > _LONGEST_NAME or not all(_SEGMENT.fullmatch(part) for part in name.split("/")):
        raise InvalidRequest(
            f"{name[:80]!r} cannot be a name in the archive",
            field="name",
            hint="use letters, digits and . _ + : = @ -, in parts joined by /, no part starting with a sign",
        )
    return name


def _bad_url(why: str) -> InvalidRequest:
    # Nothing of the URL is quoted: it may hold a password.
    return InvalidRequest(
        f"the archive's URL cannot be used: {why}",
        field="archive",
        hint="write /path or s3://bucket/prefix?endpoint=https://host&region=name",
    )


class _Directory(Remote):
    def __init__(self, path: str):
        self._root = os.path.normpath(path)
        self.description = self._root

    def put(self, name: str, data: bytes) -> None:
        def fill(fd: int) -> None:
            write_whole(fd, data)

        self._keep(name, fill)

    def put_file(self, name: str, path: str) -> None:
        target = self._path(name)
        with _reading(path) as source, self._storing():
            if not self._link(source, path, target):
                self._keep(name, lambda fd: _copy(source, fd))

    def _link(self, source: int, path: str, target: str) -> bool:
        """Share the file where it lies on the same file system and the name is free."""
        for _ in range(3):
            try:
                os.fchmod(source, 0o600)
                os.fsync(source)
                self._folder(os.path.dirname(target))
                os.link(path, target)
            except FileNotFoundError:  # the folder was empty and somebody removed it
                continue
            except OSError as error:
                if error.errno in {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EEXIST, errno.EOPNOTSUPP}:
                    return False
                raise
            sync_directory(os.path.dirname(target))
            return True
        return False

    def _keep(self, name: str, fill: Callable[[int], None]) -> None:
        target = self._path(name)
        with self._storing():
            aside = os.path.join(self._aside(), secrets.token_hex(16))
            fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)  # as long as it is held, nobody takes the file for abandoned
                fill(fd)
                os.fsync(fd)
                self._rename(aside, target)
            except BaseException:
                with suppress(OSError):
                    os.unlink(aside)
                raise
            finally:
                os.close(fd)

    def _rename(self, aside: str, target: str) -> None:
        for left in reversed(range(3)):
            self._folder(os.path.dirname(target))
            try:
                os.rename(aside, target)
                sync_directory(os.path.dirname(target))
            except FileNotFoundError:
                if not left:
                    raise
            else:
                return

    def get(self, name: str) -> bytes:
        with self._opened(name) as fd, self._storing():
            return _read(fd, 0, os.fstat(fd).st_size)

    def get_file(self, name: str, path: str) -> None:
        with self._opened(name) as source, _writing(path) as fd:
            if not clone(source, fd):
                _copy(source, fd)

    def get_range(self, name: str, start: int, length: int) -> bytes:
        with self._opened(name) as fd, self._storing():
            return _read(fd, start, length)

    def size(self, name: str) -> int | None:
        path = self._path(name)
        with self._storing():
            try:
                return os.stat(path).st_size
            except FileNotFoundError:
                return None

    def entries(self, prefix: str) -> Iterator[Entry]:
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
                raise _missing(name) from None
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


class _Bucket(Remote):
    def __init__(self, url: str):
        parts, options = _split(url)
        bucket, prefix = parts
        endpoint = options.get("endpoint")
        if not any(all(os.environ.get(name) for name in names) for names in _CREDENTIALS):
            # The library would go and ask the network for some.
            raise InvalidRequest(
                "there are no keys for the archive's bucket",
                field="archive",
                hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            )
        self._bucket = bucket
        self.description = f"s3://{bucket}/{prefix}".rstrip("/") + (f" at {endpoint}" if endpoint else "")
        try:
            self._store = S3Store(
                bucket,
                prefix=prefix or None,
                config={
                    "region": options.get("region", os.environ.get("AWS_REGION") or "us-east-1"),
                    "virtual_hosted_style_request": options.get("virtual_hosted") == "true",
                    **({"endpoint": endpoint, "aws_endpoint_url_s3": endpoint} if endpoint else {}),
                },
                client_options={
                    "allow_http": endpoint is not None and endpoint.startswith("http://"),
                    "connect_timeout": timedelta(seconds=3),
                    "timeout": timedelta(seconds=20),
                    "pool_idle_timeout": timedelta(seconds=1),
                },
                retry_config={
                    "max_retries": 3,
                    "retry_timeout": timedelta(seconds=5),
                    "backoff": {
                        "init_backoff": timedelta(milliseconds=200),
                        "max_backoff": timedelta(seconds=1),
                        "base": 2,
                    },
                },
            )
        except (BaseError, ValueError, TypeError):
            raise _bad_url("the bucket, the endpoint or the region is not understood") from None

    def put(self, name: str, data: bytes) -> None:
        check_remote_name(name)
        with self._asking():
            obstore.put(self._store, name, data, chunk_size=_PART, max_concurrency=_PARTS_AT_ONCE)

    def put_file(self, name: str, path: str) -> None:
        check_remote_name(name)
        with _reading(path) as fd, os.fdopen(os.dup(fd), "rb") as file, self._asking():
            obstore.put(self._store, name, file, chunk_size=_PART, max_concurrency=_PARTS_AT_ONCE)

    def get(self, name: str) -> bytes:
        check_remote_name(name)
        with self._asking(name):
            return bytes(obstore.get(self._store, name).bytes())

    def get_file(self, name: str, path: str) -> None:
        size = self.size(name)
        if size is None:
            raise _missing(name)
        with _writing(path) as fd:
            # In ranges, because a request may last only so long: a big object over a slow line must still arrive.
            for start in range(0, size, _PART):
                write_whole(fd, self.get_range(name, start, min(_PART, size - start)))

    def get_range(self, name: str, start: int, length: int) -> bytes:
        check_remote_name(name)
        if length <= 0:
            return b""
        with self._asking(name):
            try:
                return bytes(obstore.get_range(self._store, name, start=start, length=length))
            except BaseError as error:
                if _code(error) == "InvalidRange":
                    return b""
                raise

    def size(self, name: str) -> int | None:
        check_remote_name(name)
        try:
            with self._asking(name):
                return obstore.head(self._store, name)["size"]
        except NotFound:
            return None

    def entries(self, prefix: str) -> Iterator[Entry]:
        check_remote_name(prefix)
        with self._asking():
            for chunk in obstore.list(self._store, prefix):
                for meta in chunk:
                    yield Entry(meta["path"], meta["size"], meta["last_modified"].timestamp())

    def delete(self, names: Iterable[str]) -> None:
        wanted = [check_remote_name(name) for name in names]
        if wanted:
            with self._asking():
                obstore.delete(self._store, wanted)

    @contextmanager
    def _asking(self, name: str | None = None) -> Iterator[None]:
        """The library's errors become ours. None of their text is kept: it may hold keys or signatures."""
        try:
            yield
        except FileNotFoundError as error:
            if name is not None and _code(error) != "NoSuchBucket":
                raise _missing(name) from None
            raise self._unavailable("there is no such bucket", f"make the bucket {self._bucket}") from None
        except BaseError as error:
            code = _code(error)
            if code == "NoSuchBucket":
                raise self._unavailable("there is no such bucket", f"make the bucket {self._bucket}") from None
            if code in _REFUSALS or isinstance(error, PermissionDeniedError | UnauthenticatedError):
                why = f"it refuses us{f' ({code})' if code else ''}"
                raise self._unavailable(why, "see that the AWS variables hold the keys of this bucket") from None
            why = f"it answers {code}" if code else "it cannot be reached or does not answer in time"
            raise self._unavailable(why, "see that the endpoint is right and the server is up") from None

    def _unavailable(self, why: str, hint: str) -> ArchiveUnavailable:
        return ArchiveUnavailable(f"the archive at {self.description} cannot be used: {why}", hint=hint)


def _split(url: str) -> tuple[tuple[str, str], dict[str, str]]:
    try:
        parts = urlsplit(url)
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True) if parts.query else []
        port = parts.port
    except ValueError:
        raise _bad_url("it is malformed") from None
    if "@" in parts.netloc or port is not None or parts.fragment:
        raise _bad_url("after s3:// comes the name of a bucket alone; keys belong in the AWS variables")
    if not _BUCKET.fullmatch(parts.netloc):
        raise _bad_url("a bucket's name is 3 to 63 small letters, digits, dots and hyphens")
    options = dict(pairs)
    if len(options) != len(pairs) or options.keys() - _OPTIONS:
        raise _bad_url(f"after ? come {', '.join(sorted(_OPTIONS))}, each at most once")
    prefix = parts.path.strip("/")
    if prefix and not all(_SEGMENT.fullmatch(part) for part in prefix.split("/")):
        raise _bad_url("the prefix holds letters, digits and . _ + : = @ - only")
    endpoint = options.get("endpoint")
    if endpoint is not None:
        place = urlsplit(endpoint)
        if place.scheme not in {"http", "https"} or not place.hostname or "@" in place.netloc or place.query:
            raise _bad_url("the endpoint is http://host:port or https://host:port")
    if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", options.get("region", "x")):
        raise _bad_url("the region is letters, digits and hyphens")
    if options.get("virtual_hosted", "true") not in {"true", "false"}:
        raise _bad_url("virtual_hosted is true or false")
    return (parts.netloc, prefix), options


def _code(error: BaseException) -> str:
    """The one word of an answer that is safe to show."""
    found = _CODE.search(str(error))
    return found[1] if found is not None else ""


def _missing(name: str) -> NotFound:
    return NotFound(f"the archive has no {name!r}", field="name")


@contextmanager
def _reading(path: str) -> Iterator[int]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise PlatformError(f"a file for the archive cannot be read: {error.strerror}", errno=error.errno) from error
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _writing(path: str) -> Iterator[int]:
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
