"""Many files as one stream: whatever goes in comes out, however the bytes arrive; nonsense is refused."""

from __future__ import annotations

import itertools
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.errors import InvalidRequest
from carrel.models.bundles import END, MOST_FILES, MOST_HEAD, BundlePart, Unbundling

PATHS = st.text(st.characters(exclude_characters="\0"), min_size=1, max_size=30) | st.just("not\udcffutf8")
FILES = st.lists(
    st.tuples(st.sampled_from(["file", "problem"]), PATHS, st.binary(max_size=200), st.none() | st.integers(0, 0o777)),
    max_size=8,
)


def taken_apart(stream: bytes, cuts: list[int]) -> tuple[list[tuple[BundlePart, bytes]], Unbundling]:
    parser, found = Unbundling(), []
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(edges):
        for item in parser.feed(stream[start:end]):
            if isinstance(item, BundlePart):
                found.append((item, b""))
            else:
                part, content = found[-1]
                found[-1] = part, content + item
    return found, parser


@given(files=FILES, cuts=st.lists(st.integers(0, 5000), max_size=12))
def test_what_goes_in_comes_out(files: list[tuple[str, str, bytes, int | None]], cuts: list[int]) -> None:
    parts = [(BundlePart(kind, len(data), path, mode), data) for kind, path, data, mode in files]  # type: ignore[arg-type]
    stream = b"".join(part.head() + data for part, data in parts) + END
    found, parser = taken_apart(stream, cuts)
    assert found == parts and parser.ended
    parser.finish()


@given(files=FILES, missing=st.integers(1, 100))
def test_what_is_cut_off_is_noticed(files: list[tuple[str, str, bytes, int | None]], missing: int) -> None:
    stream = b"".join(BundlePart("file", len(data), path).head() + data for _, path, data, _ in files) + END
    _, parser = taken_apart(stream[: max(0, len(stream) - missing)], [])
    with pytest.raises(InvalidRequest, match="in the middle"):
        parser.finish()


@given(st.binary(max_size=300))
def test_nonsense_is_refused_or_not_finished(data: bytes) -> None:
    parser = Unbundling()
    try:
        for _ in parser.feed(data):
            pass
        parser.finish()
    except InvalidRequest:
        return
    assert data.startswith(END) or parser.ended


@pytest.mark.parametrize(
    "head",
    [
        [],
        {},
        {"kind": "file"},
        {"kind": "other", "size": 1},
        {"kind": "file", "size": -1},
        {"kind": "file", "size": True},
        {"kind": "file", "size": 1 << 60},
        {"kind": "file", "size": 1, "path": 1},
        {"kind": "file", "size": 1, "path": "a\0b"},
        {"kind": "file", "size": 1, "mode": 0o1777},
        {"kind": "file", "size": 1, "mode": "644"},
    ],
)
def test_bad_heads(head: object) -> None:
    text = json.dumps(head).encode()
    with pytest.raises(InvalidRequest):
        list(Unbundling().feed(struct.pack(">I", len(text)) + text + b"x"))


def test_bounds() -> None:
    with pytest.raises(InvalidRequest):
        list(Unbundling().feed(struct.pack(">I", MOST_HEAD + 1)))
    with pytest.raises(InvalidRequest):
        BundlePart("file", 1, "x" * MOST_HEAD).head()
    with pytest.raises(InvalidRequest, match="bytes after"):
        list(Unbundling().feed(END + b"x"))
    many = BundlePart("file", 0, "x").head() * (MOST_FILES + 2)
    with pytest.raises(InvalidRequest, match="more than"):
        list(Unbundling().feed(many))
