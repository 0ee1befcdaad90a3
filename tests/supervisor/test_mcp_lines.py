"""What is a message and what is not, however the bytes come."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.supervisor.mcp_lines import (
    MOST_LINE,
    MOST_OTHER_BYTES,
    MOST_OTHER_LINES,
    NO_MESSAGE,
    NO_TEXT,
    SHOWN,
    TOO_LONG,
    MessageLines,
)


def taken(lines: MessageLines) -> list[bytes]:
    found = []
    while (message := lines.take()) is not None:
        found.append(bytes(message))
    return found


def fed(data: bytes, size: int = 65536) -> MessageLines:
    lines = MessageLines()
    for start in range(0, len(data), size):
        lines.feed(data[start : start + size])
    return lines


blanks = st.sampled_from(["", " ", "\t", "\r", " \t \r"])
messages = st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3).map(
    lambda value: json.dumps(value, ensure_ascii=False)
)
others = st.one_of(
    st.just(""),
    st.text(max_size=30).filter(lambda text: "\n" not in text and not text.strip().startswith("{")),
    st.text(max_size=30).filter(lambda text: "\n" not in text and not text.strip().endswith("}")).map("{".__add__),
)
printed = st.lists(st.tuples(st.booleans(), blanks, messages, others, blanks), max_size=20)


@given(printed=printed, sizes=st.lists(st.integers(1, 50), min_size=1), rest=others)
def test_every_message_once_and_in_order(
    printed: list[tuple[bool, str, str, str, str]], sizes: list[int], rest: str
) -> None:
    expected, text = [], ""
    for is_message, before, message, other, after in printed:
        text += before + (message if is_message else other) + after + "\n"
        if is_message:
            expected.append(message.encode())
    data, lines, found = (text + rest).encode(errors="replace"), MessageLines(), []
    for number in range(len(data)):
        size = sizes[number % len(sizes)]
        lines.feed(data[:size])
        found += taken(lines)
        data = data[size:]
        if not data:
            break
    lines.finish()
    assert lines.broken is None
    assert found == expected
    assert lines.held == 0


@given(data=st.binary(max_size=300), size=st.integers(1, 300))
def test_no_bytes_do_harm(data: bytes, size: int) -> None:
    lines = fed(data, size)
    if lines.broken is None:
        # The rest may be the beginning of a character.
        assert data.decode(errors="ignore").encode() == data or data[-3:].decode(errors="ignore").encode() != data[-3:]
    else:
        assert lines.broken == NO_TEXT
        with pytest.raises(UnicodeDecodeError):
            data.decode()
    for message in taken(lines):
        assert message.startswith(b"{")
        assert message.endswith(b"}")
        assert b"\n" not in message
        assert message in data
    assert lines.held <= len(data)


@given(size=st.integers(1, 10))
def test_messages_before_a_breach_are_kept(size: int) -> None:
    lines = fed('{"é": 1}\n{}\n'.encode() + b'{"\xff": 2}\n{}\n', size)
    assert taken(lines) == ['{"é": 1}'.encode(), b"{}"]
    assert lines.broken == NO_TEXT


def test_the_longest_line() -> None:
    longest = b"{" + b"x" * (MOST_LINE - 2) + b"}"
    lines = fed(longest + b"\n")
    assert taken(lines) == [longest]
    lines = fed(b"{}\n{x" + longest)
    assert (taken(lines), lines.broken, lines.held) == ([b"{}"], TOO_LONG, 0)
    lines.feed(b"\n{}\n")
    assert taken(lines) == []


@pytest.mark.parametrize("line", [b"x", b"{", b"[1]", b'"a"', b"}{", b"123"])
def test_as_many_other_lines_as_are_bearable(line: bytes) -> None:
    lines = fed((line + b"\n") * MOST_OTHER_LINES + b"{}\n" + (line + b"\n") * MOST_OTHER_LINES)
    assert (taken(lines), lines.broken, len(lines.others)) == ([b"{}"], None, 2 * MOST_OTHER_LINES)
    lines.feed(line + b"\n")
    assert lines.broken == NO_MESSAGE


@pytest.mark.parametrize("flood", [b"x", b" ", b"\n", b" \n", b"xy\n" * 40 + b"z" * 4000, b"\xc3\xa9"])
def test_floods_are_not_kept(flood: bytes) -> None:
    lines, fed_bytes = MessageLines(), 0
    while lines.broken is None and fed_bytes < 2 * MOST_OTHER_BYTES:
        lines.feed(flood * 1000)
        fed_bytes += 1000 * len(flood)
        assert lines.held <= SHOWN
    assert lines.broken == NO_MESSAGE


def test_what_is_shown_of_other_lines() -> None:
    lines = fed(b"  welcome \n" + b"y" * 1000 + b"\n{ not closed\nhalf", 3)
    lines.finish()
    assert lines.others == [b"welcome", b"y" * SHOWN, b"{ not closed", b"half"]


def test_giving_up() -> None:
    lines = fed(b"{}\n{half")
    lines.give_up("why")
    lines.give_up("another")
    lines.finish()
    assert (lines.broken, taken(lines), lines.others, lines.held) == ("why", [b"{}"], [], 0)
