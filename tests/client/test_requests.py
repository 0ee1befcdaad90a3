from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.client.requests import limits_body
from carrel.models import Limits

NAMES = sorted(Limits.model_fields)


@given(st.dictionaries(st.sampled_from(NAMES), st.none() | st.integers(64, 1000)))
def test_only_what_was_given_is_sent(given: dict[str, float | None]) -> None:
    wanted = {name: value for name, value in given.items() if value is not None}
    assert limits_body(given) == wanted
    assert limits_body(Limits.model_validate(given)) == wanted


@pytest.mark.parametrize("name", ["memory", "cpu"])
def test_an_unknown_limit_is_left_to_the_server_to_refuse(name: str) -> None:
    assert limits_body({name: 5}) == {name: 5}
