from __future__ import annotations

import base64

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carrel.redaction.spellings import NO, SHORTEST, WAIT, Spelling, is_wrapped, spellings

CALM = settings(deadline=None)
VALUES = st.binary(min_size=SHORTEST, max_size=80).filter(lambda value: len(value.strip()) == len(value))
LABEL = b"[x]"


@CALM
@given(VALUES, st.binary(max_size=3), st.binary(max_size=3))
def test_base64_is_known_wherever_the_value_stands(value: bytes, before: bytes, after: bytes) -> None:
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        encoded = encode(before + value + after)
        bodies = [each.body for each in spellings(LABEL, value) if each.body in encoded]
        assert any(len(body) * 6 >= len(value) * 8 - 12 for body in bodies)


@CALM
@given(VALUES)
def test_a_spelling_begins_with_its_anchors_and_is_whole_or_waited_for(value: bytes) -> None:
    for each in spellings(LABEL, value):
        heads = [anchor for anchor, _whole in each.anchors()]
        assert each.body.startswith(heads[0])
        assert all(head.translate(None, b"\r\n") == heads[0] for head in heads) or b"\n" in value or b"\r" in value
        assert each.match(b"--" + each.body + b"!", 2, final=False) == 2 + len(each.body)
        for cut in range(len(heads[0]), len(each.body)):
            assert each.match(each.body[:cut], 0, final=False) == WAIT
        assert each.match(each.body[:-1] + bytes([each.body[-1] ^ 1]), 0, final=False) == NO


@CALM
@given(st.binary(min_size=12, max_size=120), st.integers(0, 75), st.sampled_from([b"\n", b"\r\n"]))
def test_breaks_of_lines_do_not_hide_it(value: bytes, column: int, line_break: bytes) -> None:
    spelling = Spelling(LABEL, value.hex().encode(), 6, broken=True)
    text = b"0" * column + spelling.body
    lines = [text[at : at + 76] for at in range(0, len(text), 76)]
    data = line_break.join(lines) + b"..."
    start = column
    end = spelling.match(data, start, final=False)
    assert data[start:end].translate(None, b"\r\n") == spelling.body
    assert end == len(data) - 3
    for cut in range(start + 8, end):
        assert spelling.match(data[:cut], start, final=False) == WAIT


@pytest.mark.parametrize(
    ("before", "wrapped"), [(b"a" * 24, True), (b"a" * 23, False), (b"all " + b"a" * 23, False), (b"+/_-" * 6, True)]
)
def test_a_break_counts_only_in_a_long_line(before: bytes, wrapped: bool) -> None:
    assert is_wrapped(before, len(before)) is wrapped
    spelling = Spelling(LABEL, b"0123456789abcdef", 6, broken=True)
    assert (spelling.match(before + b"012\n3456789abcdef", len(before), final=True) != NO) is wrapped


def test_what_the_end_cuts_off_counts_when_it_tells_enough() -> None:
    spelling = Spelling(LABEL, b"0123456789abcdefghij", 16)
    assert spelling.match(b"0123456789", 0, final=True) == 10
    assert spelling.match(b"012345678", 0, final=True) == NO
    assert list(spelling.revealing_starts()) == [b"0123456789abcdef"[:size] for size in range(10, 16)]
    assert Spelling(LABEL, b"0123456", 16).match(b"012345", 0, final=True) == NO
