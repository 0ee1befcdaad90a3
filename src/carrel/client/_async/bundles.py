"""Many files in one request or answer, as streams: local files and bytes out, local files in. Knows the form of
bundles, and no route.
"""

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
from carrel.models.bundles import END, Part, Unbundling

INLINE = 256 * 1024
MOST_INLINE = 256
"""How many bytes and files go with a request; what is more goes as a bundle."""
GivenFiles = Mapping[str, bytes | str | os.PathLike[str]]
"""What is to be put where: bytes, or the path of a local file."""


async def bundled(files: GivenFiles, request: bytes | None = None) -> AsyncGenerator[bytes, None]:
    """A bundle of files, after the request that they are for."""
    if request is not None:
        yield Part("request", len(request)).head() + request
    for path, given in files.items():
        if isinstance(given, bytes):
            yield Part("file", len(given), path).head() + given
            continue
        with await blocking(_opened, Path(given)) as file:
            status = os.fstat(file.fileno())
            left = status.st_size
            yield Part("file", left, path, status.st_mode & 0o777).head()
            while left:
                piece = await blocking(file.read, min(CHUNK, left))
                if not piece:
                    raise InvalidRequest(f"{given} became shorter while it was read", field="files")
                left -= len(piece)
                yield piece
    yield END


class AsyncUnbundled:
    """A bundle that arrives, part by part."""

    def __init__(self, connection: AsyncConnection, response: AsyncReply):
        self._connection = connection
        self._response = response
        self._items = self._read()
        self._next: Part | None = None

    async def __aenter__(self) -> AsyncUnbundled:
        """Begin."""
        await self._advance()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the answer, read or not."""
        await self._items.aclose()
        await self._response.aclose()

    async def _read(self) -> AsyncGenerator[Part | bytes, None]:
        parser = Unbundling()
        try:
            async for data in self._response.aiter_raw():
                for item in parser.feed(data):
                    yield item
            parser.finish()
        except FAILED as error:
            raise self._connection.unreachable(error) from None
        except InvalidRequest as error:
            raise PlatformError(f"the answer of the server broke off: {error.detail}", hint="ask again") from None

    async def _advance(self) -> bytes | None:
        async for item in self._items:
            if isinstance(item, bytes):
                return item
            self._next = item
            return None
        self._next = None
        return None

    def part(self) -> Part | None:
        """The part that comes now, whose content is to be taken next; None at the end."""
        return self._next

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The content of the part that comes now."""
        while (piece := await self._advance()) is not None:
            yield piece

    async def whole(self) -> bytes:
        """All of the content of the part that comes now, which is small."""
        return b"".join([piece async for piece in self.pieces()])


def encoded_files(files: GivenFiles) -> dict[str, str] | None:
    """Files as they go with a request, in base64; None for what is better sent as it is."""
    given = {path: data for path, data in files.items() if isinstance(data, bytes)}
    if len(given) < len(files) or len(given) > MOST_INLINE or sum(map(len, given.values())) > INLINE:
        return None
    return {path: base64.b64encode(data).decode() for path, data in given.items()}


def _opened(source: Path) -> IO[bytes]:
    try:
        return source.open("rb")
    except OSError as error:
        raise InvalidRequest(f"cannot read {source}: {error.strerror}", field="files") from None
