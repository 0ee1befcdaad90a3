"""Frames of the line between a machine and its host: what one end packs the other reads, and nothing else is taken."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.isolation.machine.frames import (
    MOST_PAYLOAD,
    WINDOW,
    BrokenLine,
    Frame,
    Kind,
    LineReader,
    Place,
    Stream,
    packed,
    packed_credit,
)

NUMBERS = st.integers(1, (1 << 32) - 1)
FRAMES = st.one_of(
    st.builds(Frame, st.just(Kind.OPEN), NUMBERS, st.sampled_from([each for each in Place if each])),
    st.builds(Frame, st.just(Kind.DATA), NUMBERS, st.just(Place.NONE), st.binary(min_size=1, max_size=100)),
    st.builds(Frame, st.sampled_from([Kind.END, Kind.CLOSE]), NUMBERS),
    st.builds(Frame, st.just(Kind.CREDIT), NUMBERS, st.just(Place.NONE), st.binary(min_size=4, max_size=4)),
)


@given(st.lists(FRAMES), st.integers(1, 50))
def test_frames_arrive_whole_however_they_are_cut(frames, step):
    data = b"".join(packed(each.kind, each.stream, each.place, each.payload) for each in frames)
    reader = LineReader()
    assert [got for at in range(0, len(data), step) for got in reader.frames(data[at : at + step])] == frames


@given(st.binary(max_size=2000))
def test_any_bytes_are_frames_or_a_broken_line(data):
    reader = LineReader()
    try:
        for frame in reader.frames(data):
            assert packed(frame.kind, frame.stream, frame.place, frame.payload) in data
    except BrokenLine:
        return


@pytest.mark.parametrize(
    "data",
    [
        packed(Kind.DATA, 1, payload=bytes(MOST_PAYLOAD + 1)),
        packed(Kind.DATA, 0, payload=b"x"),
        packed(Kind.DATA, 1),
        packed(Kind.OPEN, 1),
        packed(Kind.CLOSE, 1, Place.EGRESS),
        packed(Kind.END, 1, payload=b"x"),
        packed(Kind.CREDIT, 1, payload=b"x"),
        b"\7" + packed(Kind.END, 1)[1:],
    ],
)
def test_frames_that_are_not_well_formed_break_the_line(data):
    with pytest.raises(BrokenLine):
        list(LineReader().frames(data))


def _data(size):
    return Frame(Kind.DATA, 1, payload=bytes(size))


def test_a_stream_takes_no_more_than_it_granted():
    stream = Stream(1)
    for _ in range(WINDOW // MOST_PAYLOAD):
        stream.received(_data(MOST_PAYLOAD))
    with pytest.raises(BrokenLine, match="more data"):
        stream.received(_data(1))


def test_what_was_taken_is_granted_again():
    stream = Stream(1)
    for _ in range(10 * WINDOW // MOST_PAYLOAD):
        stream.received(_data(MOST_PAYLOAD))
        stream.taken(MOST_PAYLOAD)
    assert stream.granted + stream.owed == WINDOW


@pytest.mark.parametrize("amount", [0, 1, WINDOW])
def test_credit_that_nobody_used_breaks_the_line(amount):
    [credit] = LineReader().frames(packed_credit(1, amount))
    with pytest.raises(BrokenLine, match="credit"):
        Stream(1).received(credit)


@pytest.mark.parametrize("first", [Kind.END, Kind.CLOSE])
def test_nothing_follows_an_end(first):
    stream = Stream(1)
    stream.received(Frame(first, 1))
    with pytest.raises(BrokenLine):
        stream.received(_data(1))
