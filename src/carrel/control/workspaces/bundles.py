"""Many files in one stream: each is written or read as an operation of its own, so that policy and audit see every one.
Only a few small files are in memory at a time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

from carrel.control.operations.caller import Caller
from carrel.control.operations.operations import Operations
from carrel.errors import CarrelError, InvalidRequest, SandboxLost
from carrel.models import FilesWritten
from carrel.models.bundles import BundlePart, Unbundling

SMALL = 64 * 1024
AT_ONCE = 16
MOST_REQUEST = 32 * 1024 * 1024


class Incoming:
    """A bundle that is being received: one part after the other, each with its content."""

    def __init__(self, content: AsyncIterator[bytes]):
        self._items = self._read(content)
        self._next: BundlePart | None = None
        self._begun = False

    async def _read(self, content: AsyncIterator[bytes]) -> AsyncIterator[BundlePart | bytes]:
        parser = Unbundling()
        async for data in content:
            for item in parser.feed(data):
                yield item
        parser.finish()

    async def part(self) -> BundlePart | None:
        """Return the next part, after the content of the previous one was read; None at the end."""
        if not self._begun:
            self._begun = True
            await self._advance()
        part, self._next = self._next, None
        return part

    async def _advance(self) -> bytes | None:
        item = await anext(self._items, None)
        if isinstance(item, bytes):
            return item
        self._next = item
        return None

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the content of the current part."""
        while (piece := await self._advance()) is not None:
            yield piece

    async def whole(self, part: BundlePart) -> bytes:
        """Return the content of a small part."""
        if part.size > MOST_REQUEST:
            raise InvalidRequest("this part of the bundle is too large", field="body", hint="send it as a file")
        return b"".join([piece async for piece in self.pieces()])


class Bundles:
    """Writes and reads many files of a sandbox at a time."""

    def __init__(self, operations: Operations):
        self._operations = operations

    async def write(self, caller: Caller, name: str, incoming: Incoming) -> FilesWritten:
        """Write every file of a bundle. When one fails, those before it stay written."""
        files = size = 0
        small: dict[str, tuple[bytes, str | None]] = {}
        while (part := await incoming.part()) is not None:
            if part.kind != "file" or not part.path:
                raise InvalidRequest(
                    "this bundle may contain only files, each with its path", field="body", hint="send nothing else"
                )
            mode = None if part.mode is None else f"{part.mode:03o}"
            if part.path in small or len(small) == AT_ONCE or part.size > SMALL:
                await self._write(caller, name, small)
            if part.size > SMALL:
                await self._operations.write_file(caller, name, part.path, incoming.pieces(), mode=mode)
            else:
                small[part.path] = await incoming.whole(part), mode
            files, size = files + 1, size + part.size
        await self._write(caller, name, small)
        return FilesWritten(files=files, bytes=size)

    async def _write(self, caller: Caller, name: str, small: dict[str, tuple[bytes, str | None]]) -> None:
        writes = (
            self._operations.write_file(caller, name, path, data, mode=mode) for path, (data, mode) in small.items()
        )
        answers = await asyncio.gather(*writes, return_exceptions=True)
        small.clear()
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer

    async def read(self, caller: Caller, name: str, paths: Sequence[str]) -> AsyncIterator[bytes]:
        """Yield the files as parts of a bundle; for one that cannot be read, a problem."""
        async with aclosing(contents(caller, self._operations, name, paths)) as found:
            async for path, each in found:
                if isinstance(each, CarrelError):
                    text = json.dumps(each.problem()).encode()
                    yield BundlePart("problem", len(text), path).head() + text
                elif isinstance(each, bytes):
                    yield BundlePart("file", len(each), path).head() + each
                else:
                    yield BundlePart("file", each.size, path).head()
                    async for piece in each.stream:
                        assert isinstance(piece, bytes)
                        yield piece


@dataclass(frozen=True, slots=True)
class Large:
    """A file that is not in memory: its size, and its stream, which is valid until the next file."""

    size: int
    stream: AsyncGenerator[int | bytes | None, None]


async def contents(
    caller: Caller, operations: Operations, name: str, paths: Sequence[str]
) -> AsyncGenerator[tuple[str, bytes | Large | CarrelError], None]:
    """Yield files in order, reading a few at once; for one that cannot be read, its error."""
    for start in range(0, len(paths), AT_ONCE):
        some = paths[start : start + AT_ONCE]
        opening = (_open(caller, operations, name, path) for path in some)
        found = await asyncio.gather(*opening, return_exceptions=True)
        async with AsyncExitStack() as stack:
            for each in found:
                if isinstance(each, Large):
                    stack.push_async_callback(each.stream.aclose)
            for path, each in zip(some, found, strict=True):
                if isinstance(each, BaseException) and not isinstance(each, CarrelError):
                    raise each
                yield path, each


async def _open(caller: Caller, operations: Operations, name: str, path: str) -> bytes | Large:
    """Open a file: the bytes of a small one, the size and stream of a large one."""
    stream = operations.read_file(caller, name, path)
    assert isinstance(stream, AsyncGenerator)
    size = await anext(stream)
    if not isinstance(size, int):
        await stream.aclose()
        raise SandboxLost("the sandbox did not say how large a file is")
    if size > SMALL:
        return Large(size, stream)
    return b"".join([piece async for piece in stream if isinstance(piece, bytes)])
