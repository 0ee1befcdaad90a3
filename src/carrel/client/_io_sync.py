"""Reading of local files for the blocking client. `_io_async` is its asynchronous counterpart."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import IO, TypeVar

from carrel.errors import InvalidRequest

T = TypeVar("T")
Source = bytes | bytearray | memoryview | str | IO[bytes] | Iterable[bytes]
Progress = Callable[[int], object]

CHUNK = 256 * 1024


def blocking(function: Callable[..., T], *arguments: object) -> T:
    """Call a function that blocks, as this client does anyway."""
    return function(*arguments)


def pause(seconds: float) -> None:
    """Wait."""
    time.sleep(seconds)


def pieces(source: Source, progress: Progress | None = None) -> Iterator[bytes]:
    """Yield the bytes of a source in pieces; `progress` is called with the size of each."""
    for piece in _pieces(source):
        yield checked_piece(piece)
        if progress is not None:
            progress(len(piece))


def checked_piece(piece: object) -> bytes:
    """Check that a source gives bytes."""
    if not isinstance(piece, bytes | bytearray | memoryview):
        raise InvalidRequest(
            f"the source gave {type(piece).__name__}, not bytes", field="data", hint="open files in binary mode"
        )
    return bytes(piece)


def _pieces(source: Source) -> Iterator[bytes]:
    if isinstance(source, str):
        source = source.encode()
    if isinstance(source, bytes | bytearray | memoryview):
        view = memoryview(source).cast("B")
        for start in range(0, len(view), CHUNK):
            yield bytes(view[start : start + CHUNK])
    elif callable(read := getattr(source, "read", None)):
        while piece := read(CHUNK):
            yield piece
    else:
        yield from source
