from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from carrel.client import Chunk
from carrel.integrations.mcp.output import Capture, Reading, boundary, decoded
from carrel.integrations.tool_results import cut_middle

MARKER = "[…]"


def chunks_of(pieces: list[bytes], start: int = 0) -> list[Chunk]:
    found, offset = [], start
    for index, piece in enumerate(pieces):
        offset += len(piece)
        stream = "stdout" if index % 2 == 0 else "stderr"
        found.append(Chunk(stream, piece, piece.decode("utf-8", "replace"), offset))
    return found


texts = st.lists(st.text(st.sampled_from("aé€😀\n"), max_size=12).map(str.encode), max_size=12)


@given(texts, st.integers(4, 20), st.integers(4, 20))
def test_what_is_shown_and_what_is_left_out_are_the_whole(pieces: list[bytes], head: int, tail: int) -> None:
    whole = b"".join(pieces)
    capture = Capture(head=head, tail=tail)
    for chunk in chunks_of(pieces):
        capture.add(chunk)
    shown = capture.text(MARKER)
    assert capture.total == len(whole) and capture.offset == len(whole)
    if not capture.left_out:
        assert shown == whole.decode()
        return
    first, last = shown.split(f"\n{MARKER}\n")
    assert "\ufffd" not in shown
    assert whole.decode().startswith(first) and whole.decode().endswith(last)
    assert len(first.encode()) + capture.left_out + len(last.encode()) == len(whole)
    assert len(first.encode()) <= head and len(last.encode()) <= tail
    assert capture.resume == len(first.encode()), "reading on from there loses nothing"


@given(texts, st.integers(4, 30))
def test_reading_on_gives_everything_once(pieces: list[bytes], limit: int) -> None:
    whole = b"".join(pieces)
    got, offset = "", 0
    while True:
        reading = Reading(offset, limit=limit)
        # What a server sends from an offset on: pieces of its own choice, text cut between characters.
        for chunk in chunks_of([each.encode() for each in whole[offset:].decode()], offset):
            if not reading.add(chunk):
                break
        assert len(reading.text) <= limit
        got += reading.text
        if not reading.more:
            break
        assert reading.offset > offset, "every reading gets further"
        offset = reading.offset
    assert (reading.offset, got) == (len(whole), whole.decode())


def test_a_chunk_from_which_something_was_taken_is_not_cut() -> None:
    capture = Capture(head=10, tail=10)
    capture.add(Chunk("stdout", b"abc", "abc", 3))
    capture.add(Chunk("stdout", b"[redacted] and more words", "", 100))
    capture.add(Chunk("stdout", b"end", "end", 103))
    assert capture.resume == 3
    assert capture.text(MARKER) == "abc\n[…]\ne wordsend"
    reading = Reading(0, limit=10)
    assert reading.add(Chunk("stdout", b"abc", "abc", 3))
    assert not reading.add(Chunk("stdout", b"[redacted] and more", "", 100))
    assert (reading.text, reading.offset, reading.more) == ("abc", 3, True)
    alone = Reading(3, limit=10)
    assert not alone.add(Chunk("stdout", b"[redacted] and more", "", 100))
    assert (alone.text, alone.offset) == ("[redacted] and more", 100)


def test_the_last_line_is_remembered() -> None:
    capture = Capture()
    for chunk in chunks_of([b"one\ntwo\n", b"three"]):
        capture.add(chunk)
    assert capture.last_line == "three"
    capture.add(Chunk("stdout", b"\n", "", 14))
    assert capture.last_line == "three"


@given(st.text(min_size=1), st.integers(1, 40))
def test_boundaries_lie_between_characters(text: str, at: int) -> None:
    data = text.encode("utf-8", "replace")
    cut = boundary(data, at)
    assert max(0, min(at, len(data)) - 3) <= cut <= at
    assert data[:cut].decode() + data[cut:].decode() == data.decode()


def test_bytes_that_are_no_text_are_cut_anywhere() -> None:
    assert boundary(b"\x80" * 20, 10) == 10
    assert decoded(b"\xff") == "\ufffd"


def test_a_long_text_loses_its_middle() -> None:
    assert cut_middle("abcdef", MARKER, head=3, tail=3) == "abcdef"
    assert cut_middle("abcdefg", MARKER, head=3, tail=3) == "abc\n[…]\nefg"
