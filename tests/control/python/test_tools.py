import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.control.python.tools import create_file
from carrel.errors import InvalidRequest


def test_text_and_bytes():
    assert create_file({"path": "a", "content": "é"}) == ("a", "é".encode(), None)
    assert create_file({"path": "a", "content_base64": base64.b64encode(b"\0").decode(), "mode": "755"}) == (
        "a",
        b"\0",
        "755",
    )


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"content": "x"}, "params.path"),
        ({"path": "a"}, "params.content"),
        ({"path": "a", "content": "x", "content_base64": "eA=="}, "params.content"),
        ({"path": "a", "content": 1}, "params.content"),
        ({"path": "a", "content_base64": "!"}, "params.content_base64"),
        ({"path": "a", "content": "x", "mode": 644}, "params.mode"),
        ({"path": "a", "content": "x", "colour": "red"}, "params.colour"),
    ],
)
def test_bad_parameters_are_named(params, field):
    with pytest.raises(InvalidRequest) as caught:
        create_file(params)
    assert caught.value.field == field and caught.value.hint


@given(
    st.dictionaries(
        st.sampled_from(["path", "content", "content_base64", "mode", "x"]), st.none() | st.text() | st.integers()
    )
)
def test_any_parameters_give_a_file_or_a_refusal(params):
    try:
        path, content, _mode = create_file(params)
    except InvalidRequest:
        return
    assert isinstance(path, str) and isinstance(content, bytes)
