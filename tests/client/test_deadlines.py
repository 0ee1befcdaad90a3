from __future__ import annotations

import math

import pytest

from carrel.client.deadlines import attended, background, limited, seconds, waited
from carrel.errors import InvalidRequest


@pytest.mark.parametrize("given", [None, 0, 0.0, math.inf])
def test_none_zero_and_infinity_mean_no_deadline(given: float | None) -> None:
    assert (seconds(given), waited(given), attended(given), background(given)) == (None, None, 0, None)


def test_default_is_left_to_the_sandbox() -> None:
    assert (waited("default"), attended("default"), background("default")) == (None, None, "default")
    assert (seconds(2.5), waited(2.5), attended(2.5), background(2.5)) == (2.5, 2.5, 2.5, 2.5)


@pytest.mark.parametrize("given", [math.nan, -1, -math.inf, True, "soon", [1]])
def test_what_is_no_number_of_seconds_is_refused(given: object) -> None:
    for read in (seconds, lambda value: limited(value, 120.0)):
        with pytest.raises(InvalidRequest) as raised:
            read(given)
        assert raised.value.field == "timeout"


def test_what_must_have_a_deadline_has_one() -> None:
    assert (limited(None, 120.0), limited(3, 120.0)) == (None, 3)
    for given in (0, 121, math.inf):
        with pytest.raises(InvalidRequest, match="at most 120 seconds"):
            limited(given, 120.0)
