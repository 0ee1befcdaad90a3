"""Bundles: many files in one request or answer, as a stream. Knows the format of bundles and no route."""

from __future__ import annotations

import base64
import os
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import IO

from carrel.client._async.connection import AsyncConnection
from carrel.client._async.wire import FAILED, AsyncReply
from carrel.client._io_async import CHUNK, blocking
from carrel.errors import InvalidRequest, PlatformError
from carrel.models.bundles import END, BundlePart, Unbundling

INLINE = 256 * 1024
MOST_INLINE = 256
"""Up to this many bytes and files are sent inside a JSON request; more are sent as a bundle."""
GivenFiles = Mapping[str, bytes | str | os.PathLike[str]]
"""Path in the workspace → its bytes, or the path of a local file."""


async def bundled(files: GivenFiles, request: bytes | None = None) -> AsyncGenerator[bytes, None]:
    """Yield a bundle: the JSON request if there is one, then the files."""
    if request is not None:
        yield BundlePart("request", len(request)).head() + request
    for path, given in files.items():
        if isinstance(given, bytes):
            yield BundlePart("file", len(given), path).head() + given
            continue
        with await blocking(open_local, Path(given)) as file:
            status = os.fstat(file.fileno())
            left = status.st_size
            yield BundlePart("file", left, path, status.st_mode & 0o777).head()
            while left:
                piece = await blocking(file.read, min(CHUNK, left))
                if not piece:
                    raise InvalidRequest(f"{given} became shorter while it was read", field="files")
                left -= len(piece)
                yield piece
    yield END


class AsyncUnbundled:
    """A bundle in the answer of the server, read part by part."""

    def __init__(self, connection: AsyncConnection, response: AsyncReply):
        self._connection = connection
        self._response = response
        self._items = self._read()
        self._next: BundlePart | None = None

    async def __aenter__(self) -> AsyncUnbundled:
        await self._advance()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._items.aclose()
        await self._response.aclose()

    async def _read(self) -> AsyncGenerator[BundlePart | bytes, None]:
        parser = Unbundling()
        try:
            async for data in self._response.aiter_raw():
                for item in parser.feed(data):
                    yield item
            parser.finish()
        except FAILED as error:
            raise self._connection.unreachable(error) from None
        except InvalidRequest as error:
            raise PlatformError(f"the server's answer is incomplete: {error.detail}", hint="try again") from None

    async def _advance(self) -> bytes | None:
        async for item in self._items:
            if isinstance(item, bytes):
                return item
            self._next = item
            return None
        self._next = None
        return None

    def part(self) -> BundlePart | None:
        """Return the current part, or None at the end. Read its content before asking for the next."""
        return self._next

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the content of the current part."""
        while (piece := await self._advance()) is not None:
            yield piece

    async def whole(self) -> bytes:
        """Read the content of the current part into memory; for small parts."""
        return b"".join([piece async for piece in self.pieces()])


def encoded_files(files: GivenFiles) -> dict[str, str] | None:
    """Encode files in base64 for a JSON request; None when they are too large for that, or local files."""
    given = {path: data for path, data in files.items() if isinstance(data, bytes)}
    if len(given) < len(files) or len(given) > MOST_INLINE or sum(map(len, given.values())) > INLINE:
        return None
    return {path: base64.b64encode(data).decode() for path, data in given.items()}


def open_local(source: Path, field: str = "files") -> IO[bytes]:
    """Open a local file that the caller named in the argument `field`."""
    try:
        return source.open("rb")
    except OSError as error:
        raise InvalidRequest(f"cannot read {source}: {error.strerror}", field=field) from None
