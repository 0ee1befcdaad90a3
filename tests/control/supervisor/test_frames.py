from __future__ import annotations

import base64
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.control.supervisor.frames import MAX_END, FrameReader, StreamChunk, TextCutter
from carrel.errors import SandboxLost

FRAMES = st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=200)), max_size=20)


def frame(kind: int, data: bytes) -> bytes:
    return struct.pack(">BI", kind, len(data)) + data


def split(data: bytes, sizes: list[int]) -> list[bytes]:
    parts = []
    for size in sizes:
        parts.append(data[:size])
        data = data[size:]
    return [*parts, data]


@given(FRAMES, st.binary(max_size=100), st.lists(st.integers(0, 30), max_size=40))
def test_however_the_bytes_come(frames: list[tuple[int, bytes]], end: bytes, sizes: list[int]) -> None:
    wire = b"".join(frame(kind, data) for kind, data in frames) + frame(0, end)
    reader = FrameReader()
    chunks = [chunk for part in split(wire, sizes) for chunk in reader.feed(part)]
    assert reader.ended
    assert chunks[-1] == StreamChunk("end", end)
    for stream, kind in (("stdout", 1), ("stderr", 2)):
        got = b"".join(chunk.data for chunk in chunks if chunk.stream == stream)
        assert got == b"".join(data for each, data in frames if each == kind)


@given(st.lists(st.binary(max_size=50), max_size=20))
def test_any_bytes_are_frames_or_refused(parts: list[bytes]) -> None:
    reader = FrameReader()
    try:
        for part in parts:
            reader.feed(part)
    except SandboxLost:
        pass


@pytest.mark.parametrize(
    "wire",
    [frame(3, b"x"), struct.pack(">BI", 0, MAX_END + 1), frame(0, b"{}") + b"x"],
)
def test_nonsense_is_refused(wire: bytes) -> None:
    with pytest.raises(SandboxLost):
        FrameReader().feed(wire)


@given(
    st.lists(
        st.tuples(st.sampled_from(["stdout", "stderr"]), st.binary(max_size=12) | st.text(max_size=6).map(str.encode))
    )
)
def test_pieces_lose_nothing_and_offsets_are_places_to_go_on(chunks: list[tuple[str, bytes]]) -> None:
    cutter = TextCutter(7)
    pieces = [piece for stream, data in chunks for piece in cutter.feed(StreamChunk(stream, data))] + cutter.flush()
    whole = b"".join(data for _, data in chunks)
    at = 0
    for piece in pieces:
        data = piece.text.encode() if piece.text is not None else base64.b64decode(piece.base64 or "")
        assert whole[at : at + len(data)] == data
        at += len(data)
        assert piece.offset == at + 7
    assert at == len(whole)


def test_a_character_that_comes_in_two_chunks_is_text() -> None:
    cutter = TextCutter()
    first, second = "aé".encode()[:2], "aé".encode()[2:]
    pieces = cutter.feed(StreamChunk("stdout", first)) + cutter.feed(StreamChunk("stdout", second))
    assert [(piece.text, piece.offset) for piece in pieces] == [("a", 1), ("é", 3)]
