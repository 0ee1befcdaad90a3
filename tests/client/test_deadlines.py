from __future__ import annotations

import math

import pytest

from carrel.client.deadlines import answer_limit, bounded_timeout, checked_seconds, run_timeout, start_timeout
from carrel.errors import InvalidRequest


@pytest.mark.parametrize("given", [None, 0, 0.0, math.inf])
def test_none_zero_and_infinity_mean_no_deadline(given: float | None) -> None:
    assert (checked_seconds(given), answer_limit(given), run_timeout(given), start_timeout(given)) == (
        None,
        None,
        0,
        None,
    )


def test_default_is_left_to_the_sandbox() -> None:
    assert (answer_limit("default"), run_timeout("default"), start_timeout("default")) == (None, None, "default")
    assert (checked_seconds(2.5), answer_limit(2.5), run_timeout(2.5), start_timeout(2.5)) == (2.5, 2.5, 2.5, 2.5)


@pytest.mark.parametrize("given", [math.nan, -1, -math.inf, True, "soon", [1]])
def test_what_is_no_number_of_seconds_is_refused(given: object) -> None:
    for read in (checked_seconds, lambda value: bounded_timeout(value, 120.0)):
        with pytest.raises(InvalidRequest) as raised:
            read(given)
        assert raised.value.field == "timeout"


def test_what_must_have_a_deadline_has_one() -> None:
    assert (bounded_timeout(None, 120.0), bounded_timeout(3, 120.0)) == (None, 3)
    for given in (0, 121, math.inf):
        with pytest.raises(InvalidRequest, match="at most 120 seconds"):
            bounded_timeout(given, 120.0)
