"""A remote that is a bucket of an S3 server."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from urllib.parse import parse_qsl, urlsplit

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import S3Store

from carrel.errors import ArchiveUnavailable, InvalidRequest
from carrel.primitives.atomic import write_all
from carrel.workspaces.remote import SEGMENT, Remote, RemoteEntry, bad_url, check_remote_name, missing, reading, writing

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_CODE = re.compile(r"<Code>([A-Za-z]{1,64})</Code>")
_REFUSALS = {"AccessDenied", "ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch"}
_PART = 5 << 20
_PARTS_AT_ONCE = 4
_OPTIONS = {"endpoint", "region", "virtual_hosted"}
_CREDENTIALS = (
    ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    ("AWS_WEB_IDENTITY_TOKEN_FILE",),
    ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",),
    ("AWS_CONTAINER_CREDENTIALS_FULL_URI",),
    ("AWS_SKIP_SIGNATURE",),
)


class Bucket(Remote):
    """Objects in a bucket. Keys come only from the usual AWS variables."""

    def __init__(self, url: str):
        parts, options = _split(url)
        bucket, prefix = parts
        endpoint = options.get("endpoint")
        if not any(all(os.environ.get(name) for name in names) for names in _CREDENTIALS):
            # Without this check the library would ask the network for keys.
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
            raise bad_url("the bucket, the endpoint or the region is not valid") from None

    def put(self, name: str, data: bytes) -> None:
        """Send one request, or several parts."""
        check_remote_name(name)
        with self._asking():
            obstore.put(self._store, name, data, chunk_size=_PART, max_concurrency=_PARTS_AT_ONCE)

    def put_file(self, name: str, path: str) -> None:
        """Send the file in parts."""
        check_remote_name(name)
        with reading(path) as fd, os.fdopen(os.dup(fd), "rb") as file, self._asking():
            obstore.put(self._store, name, file, chunk_size=_PART, max_concurrency=_PARTS_AT_ONCE)

    def get(self, name: str) -> bytes:
        """Return all bytes."""
        check_remote_name(name)
        with self._asking(name):
            return bytes(obstore.get(self._store, name).bytes())

    def get_file(self, name: str, path: str) -> None:
        """Download in ranges, because a request has a time limit: a big object must arrive over a slow line too."""
        check_remote_name(name)
        with self._asking(name):
            size = obstore.head(self._store, name)["size"]
        with writing(path) as fd:
            for start in range(0, size, _PART):
                write_all(fd, self.get_range(name, start, min(_PART, size - start)))

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """Send one request."""
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

    def entries(self, prefix: str) -> Iterator[RemoteEntry]:
        """List page by page."""
        check_remote_name(prefix)
        with self._asking():
            for chunk in obstore.list(self._store, prefix):
                for meta in chunk:
                    yield RemoteEntry(meta["path"], meta["size"], meta["last_modified"].timestamp())

    def delete(self, names: Iterable[str]) -> None:
        """Delete many names in one request."""
        wanted = [check_remote_name(name) for name in names]
        if wanted:
            with self._asking():
                obstore.delete(self._store, wanted)

    @contextmanager
    def _asking(self, name: str | None = None) -> Iterator[None]:
        """Convert the library's errors. Their text is dropped: it may hold keys or signatures."""
        try:
            yield
        except FileNotFoundError as error:
            if name is not None and _code(error) != "NoSuchBucket":
                raise missing(name) from None
            raise self._unavailable("there is no such bucket", f"make the bucket {self._bucket}") from None
        except BaseError as error:
            code = _code(error)
            if code == "NoSuchBucket":
                raise self._unavailable("there is no such bucket", f"make the bucket {self._bucket}") from None
            if code in _REFUSALS or isinstance(error, PermissionDeniedError | UnauthenticatedError):
                why = f"it refuses access{f' ({code})' if code else ''}"
                raise self._unavailable(why, "check that the AWS variables hold the keys of this bucket") from None
            why = f"it answers {code}" if code else "it cannot be reached or does not answer in time"
            raise self._unavailable(why, "check the endpoint and that the server runs") from None

    def _unavailable(self, why: str, hint: str) -> ArchiveUnavailable:
        return ArchiveUnavailable(f"the archive at {self.description} cannot be used: {why}", hint=hint)


def _split(url: str) -> tuple[tuple[str, str], dict[str, str]]:
    try:
        parts = urlsplit(url)
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True) if parts.query else []
        port = parts.port
    except ValueError:
        raise bad_url("it is malformed") from None
    if "@" in parts.netloc or port is not None or parts.fragment:
        raise bad_url("after s3:// comes the name of a bucket alone; keys belong in the AWS variables")
    if not _BUCKET.fullmatch(parts.netloc):
        raise bad_url("a bucket's name is 3 to 63 small letters, digits, dots and hyphens")
    options = dict(pairs)
    if len(options) != len(pairs) or options.keys() - _OPTIONS:
        raise bad_url(f"after ? come {', '.join(sorted(_OPTIONS))}, each at most once")
    prefix = parts.path.strip("/")
    if prefix and not all(SEGMENT.fullmatch(part) for part in prefix.split("/")):
        raise bad_url("the prefix holds letters, digits and . _ + : = @ - only")
    endpoint = options.get("endpoint")
    if endpoint is not None:
        place = urlsplit(endpoint)
        if place.scheme not in {"http", "https"} or not place.hostname or "@" in place.netloc or place.query:
            raise bad_url("the endpoint is http://host:port or https://host:port")
    if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", options.get("region", "x")):
        raise bad_url("the region is letters, digits and hyphens")
    if options.get("virtual_hosted", "true") not in {"true", "false"}:
        raise bad_url("virtual_hosted is true or false")
    return (parts.netloc, prefix), options


def _code(error: BaseException) -> str:
    """Return the error code, the only word of an answer that is safe to show."""
    found = _CODE.search(str(error))
    return found[1] if found is not None else ""
