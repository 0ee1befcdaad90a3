from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from carrel.errors import InvalidRequest
from carrel.store.cursors import decode_cursor, encode_cursor


@given(st.floats(0, 1e11), st.text(min_size=1, max_size=64))
def test_cursor_round_trip(created: float, name: str) -> None:
    assert decode_cursor(encode_cursor(created, name)) == (created, name)


@given(st.text(max_size=80))
def test_any_cursor_is_read_or_refused(text: str) -> None:
    try:
        decode_cursor(text)
    except InvalidRequest as error:
        assert error.field == "cursor"
