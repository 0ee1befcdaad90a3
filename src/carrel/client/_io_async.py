"""Reading of local files for the asynchronous client. `_io_sync` is its blocking counterpart."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from typing import IO, TypeVar

from carrel.client._io_sync import CHUNK, Progress, checked_piece

__all__ = ["CHUNK", "Progress", "Source", "blocking", "pause", "pieces"]

T = TypeVar("T")
Source = bytes | bytearray | memoryview | str | IO[bytes] | Iterable[bytes] | AsyncIterable[bytes]


async def blocking(function: Callable[..., T], *arguments: object) -> T:
    """Call a function that blocks in another thread."""
    return await asyncio.to_thread(function, *arguments)


async def pause(seconds: float) -> None:
    """Wait."""
    await asyncio.sleep(seconds)


async def pieces(source: Source, progress: Progress | None = None) -> AsyncIterator[bytes]:
    """Yield the bytes of a source in pieces; `progress` is called with the size of each."""
    async for piece in _pieces(source):
        yield checked_piece(piece)
        if progress is not None:
            progress(len(piece))


async def _pieces(source: Source) -> AsyncIterator[bytes]:
    if isinstance(source, str):
        source = source.encode()
    if isinstance(source, bytes | bytearray | memoryview):
        view = memoryview(source).cast("B")
        for start in range(0, len(view), CHUNK):
            yield bytes(view[start : start + CHUNK])
    elif isinstance(source, AsyncIterable):
        async for piece in source:
            yield piece
    elif callable(read := getattr(source, "read", None)):
        while True:
            data = read(CHUNK) if inspect.iscoroutinefunction(read) else asyncio.to_thread(read, CHUNK)
            piece = await data
            if not piece:
                return
            yield piece
    else:
        for piece in source:
            yield piece
