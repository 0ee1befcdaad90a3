"""When a server that keeps ending may start again. What a server does besides is shown in `test_mcp_starting`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.supervisor.mcp_server import FIRST_WAIT_S, GOOD_S, LONGEST_WAIT_S, QUICK_S, RestartDelay


def test_each_quick_end_doubles_the_wait() -> None:
    backoff, now, waits = RestartDelay(), 100.0, []
    for _ in range(10):
        backoff.ended(now, 0.1)
        waits.append(backoff.left(now))
        now += waits[-1]
        assert backoff.left(now) == 0
    assert waits == [0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_only_a_long_life_makes_up_for_quick_ends() -> None:
    backoff = RestartDelay()
    for now in (0.0, 1.0):
        backoff.ended(now, 0.0)
    backoff.ended(10.0, QUICK_S)
    assert backoff.left(10.0) == 0
    backoff.ended(20.0, 1.0)
    assert backoff.left(20.0) == 2
    backoff.ended(100.0, GOOD_S)
    assert backoff.left(100.0) == 0
    backoff.ended(101.0, 1.0)
    assert backoff.left(101.0) == FIRST_WAIT_S


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1000)), max_size=50))
def test_a_wait_is_never_out_of_bounds(lives: list[tuple[float, float]]) -> None:
    backoff, now = RestartDelay(), 0.0
    for lived, rest in lives:
        now += lived
        backoff.ended(now, lived)
        left = backoff.left(now)
        assert left == 0 if lived >= QUICK_S and now > LONGEST_WAIT_S * 2 else 0 <= left <= LONGEST_WAIT_S + 1e-6
        assert backoff.left(now + left) == pytest.approx(0)
        now += max(left, rest)
