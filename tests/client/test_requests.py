from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.client.requests import approved, limits_body, waiting
from carrel.errors import InvalidRequest
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


@pytest.mark.parametrize("name", ["", "apr\n-1", "é"])
def test_what_cannot_be_an_approval_is_not_sent(name: str) -> None:
    assert approved("apr-1") == {"carrel-approval": "apr-1"}
    with pytest.raises(InvalidRequest):
        approved(name)


@given(st.floats())
def test_a_wait_is_sent_as_the_server_reads_it(seconds: float) -> None:
    if 0 <= seconds <= 600:
        assert 0 <= float(waiting(seconds)["carrel-wait"]) <= 600
    else:
        with pytest.raises(InvalidRequest):
            waiting(seconds)
