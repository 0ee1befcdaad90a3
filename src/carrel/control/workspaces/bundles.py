"""Many files at once, as one stream: each is written or read as an operation of its own, so that policy and audit see
every one. Keeps no file in memory but small ones, a few at a time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

from carrel.control.operations.operations import Operations
from carrel.errors import CarrelError, InvalidRequest, SandboxLost
from carrel.models import FilesWritten
from carrel.models.bundles import Part, Unbundling

SMALL = 64 * 1024
AT_ONCE = 16
MOST_REQUEST = 32 * 1024 * 1024


class Incoming:
    """A bundle that comes in: one part after the other, each with its content."""

    def __init__(self, content: AsyncIterator[bytes]):
        self._items = self._read(content)
        self._next: Part | None = None
        self._begun = False

    async def _read(self, content: AsyncIterator[bytes]) -> AsyncIterator[Part | bytes]:
        parser = Unbundling()
        async for data in content:
            for item in parser.feed(data):
                yield item
        parser.finish()

    async def part(self) -> Part | None:
        """The next part, once the content of the one before was taken; None when there is none."""
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
        """The content of the part that was given last."""
        while (piece := await self._advance()) is not None:
            yield piece

    async def whole(self, part: Part) -> bytes:
        """The content of a small part."""
        if part.size > MOST_REQUEST:
            raise InvalidRequest("this part of the bundle is too large", field="body", hint="send it as a file")
        return b"".join([piece async for piece in self.pieces()])


class Bundles:
    """Files in and out of sandboxes, many at a time."""

    def __init__(self, operations: Operations):
        self._operations = operations

    async def write(self, name: str, incoming: Incoming) -> FilesWritten:
        """Write every file that comes. When one cannot be written, those before it are."""
        files = size = 0
        small: dict[str, tuple[bytes, str | None]] = {}
        while (part := await incoming.part()) is not None:
            if part.kind != "file" or not part.path:
                raise InvalidRequest(
                    "this bundle may have files only, each with its path", field="body", hint="send nothing else"
                )
            mode = None if part.mode is None else f"{part.mode:03o}"
            if part.path in small or len(small) == AT_ONCE or part.size > SMALL:
                await self._write(name, small)
            if part.size > SMALL:
                await self._operations.write_file(name, part.path, incoming.pieces(), mode=mode)
            else:
                small[part.path] = await incoming.whole(part), mode
            files, size = files + 1, size + part.size
        await self._write(name, small)
        return FilesWritten(files=files, bytes=size)

    async def _write(self, name: str, small: dict[str, tuple[bytes, str | None]]) -> None:
        writes = (self._operations.write_file(name, path, data, mode=mode) for path, (data, mode) in small.items())
        answers = await asyncio.gather(*writes, return_exceptions=True)
        small.clear()
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer

    async def read(self, name: str, paths: Sequence[str]) -> AsyncIterator[bytes]:
        """Files one after the other, as they are; in the place of one that cannot be read, why."""
        async with aclosing(contents(self._operations, name, paths)) as found:
            async for path, each in found:
                if isinstance(each, CarrelError):
                    text = json.dumps(each.problem()).encode()
                    yield Part("problem", len(text), path).head() + text
                elif isinstance(each, bytes):
                    yield Part("file", len(each), path).head() + each
                else:
                    yield Part("file", each.size, path).head()
                    async for piece in each.stream:
                        assert isinstance(piece, bytes)
                        yield piece


@dataclass(frozen=True, slots=True)
class Large:
    """A file that is not kept in memory: its size, and its bytes for as long as it is the one that was given last."""

    size: int
    stream: AsyncGenerator[int | bytes | None, None]


async def contents(
    operations: Operations, name: str, paths: Sequence[str]
) -> AsyncGenerator[tuple[str, bytes | Large | CarrelError], None]:
    """Files in their order, a few asked for at once; in the place of one that cannot be read, why."""
    for start in range(0, len(paths), AT_ONCE):
        some = paths[start : start + AT_ONCE]
        opening = (_open(operations, name, path) for path in some)
        found = await asyncio.gather(*opening, return_exceptions=True)
        async with AsyncExitStack() as stack:
            for each in found:
                if isinstance(each, Large):
                    stack.push_async_callback(each.stream.aclose)
            for path, each in zip(some, found, strict=True):
                if isinstance(each, BaseException) and not isinstance(each, CarrelError):
                    raise each
                yield path, each


async def _open(operations: Operations, name: str, path: str) -> bytes | Large:
    """A small file, or the size and the stream of another."""
    stream = operations.read_file(name, path)
    assert isinstance(stream, AsyncGenerator)
    size = await anext(stream)
    if not isinstance(size, int):
        await stream.aclose()
        raise SandboxLost("the sandbox did not say how large a file is")
    if size > SMALL:
        return Large(size, stream)
    return b"".join([piece async for piece in stream if isinstance(piece, bytes)])
