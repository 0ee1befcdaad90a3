from __future__ import annotations

import io
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.client._io_sync import CHUNK, blocking, pieces
from carrel.errors import InvalidRequest

SOURCES = {
    "bytes": bytes,
    "bytearray": bytearray,
    "memoryview": memoryview,
    "file": io.BytesIO,
    "list": lambda data: [data[:7], b"", data[7:]],
    "generator": lambda data: iter([data]),
}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("size", [0, 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_every_source_gives_its_bytes_and_progress_hears_of_all(kind: str, size: int) -> None:
    data = (bytes(range(256)) * (size // 256 + 1))[:size]
    heard: list[int] = []
    assert b"".join(pieces(SOURCES[kind](data), heard.append)) == data
    assert sum(heard) == size
    if kind not in {"list", "generator"}:
        assert max(heard, default=0) <= CHUNK


@given(st.text(max_size=50))
def test_text_is_utf8(text: str) -> None:
    assert b"".join(pieces(text)) == text.encode()


def test_wide_items_are_counted_in_bytes() -> None:
    wide = memoryview(bytes(16)).cast("I")
    assert b"".join(pieces(wide)) == bytes(16)


def test_what_is_not_bytes_is_refused() -> None:
    for source in (io.StringIO("text"), ["text"], [5]):
        with pytest.raises(InvalidRequest) as caught:
            list(pieces(source))  # type: ignore[arg-type]
        assert (caught.value.field, caught.value.hint) == ("data", "open files in binary mode")


def test_blocking_runs_here() -> None:
    assert blocking(threading.get_ident) == threading.get_ident()
