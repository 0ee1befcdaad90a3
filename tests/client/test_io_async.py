from __future__ import annotations

import io
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from carrel.client._io_async import CHUNK, Source, blocking, pieces
from carrel.errors import InvalidRequest


class AsyncFile:
    """A file whose reading is awaited."""

    def __init__(self, data: bytes):
        self._file = io.BytesIO(data)

    async def read(self, size: int) -> bytes:
        return self._file.read(size)


class Elsewhere(io.BytesIO):
    """A file that must not be read where the event loop runs."""

    loop_thread = 0

    def read(self, size: int | None = -1, /) -> bytes:
        assert threading.get_ident() != self.loop_thread
        return super().read(size)


async def generator(data: bytes) -> AsyncIterator[bytes]:
    yield data[:7]
    yield data[7:]


SOURCES: dict[str, Callable[[bytes], object]] = {
    "bytes": bytes,
    "bytearray": bytearray,
    "memoryview": memoryview,
    "file": Elsewhere,
    "async file": AsyncFile,
    "list": lambda data: [data[:7], b"", data[7:]],
    "async generator": generator,
}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("size", [0, 1, CHUNK, 3 * CHUNK + 5])
async def test_every_source_gives_its_bytes_and_progress_hears_of_all(kind: str, size: int) -> None:
    Elsewhere.loop_thread = threading.get_ident()
    data = (bytes(range(256)) * (size // 256 + 1))[:size]
    heard: list[int] = []
    source: Source = SOURCES[kind](data)  # type: ignore[assignment]
    assert b"".join([piece async for piece in pieces(source, heard.append)]) == data
    assert sum(heard) == size
    if kind not in {"list", "async generator"}:
        assert max(heard, default=0) <= CHUNK


async def test_text_is_utf8() -> None:
    assert [piece async for piece in pieces("grüße")] == ["grüße".encode()]


async def test_what_is_not_bytes_is_refused() -> None:
    for source in (io.StringIO("text"), ["text"], [5]):
        with pytest.raises(InvalidRequest) as caught:
            [piece async for piece in pieces(source)]  # type: ignore[arg-type]
        assert (caught.value.field, caught.value.hint) == ("data", "open files in binary mode")


async def test_blocking_runs_elsewhere() -> None:
    assert await blocking(threading.get_ident) != threading.get_ident()
