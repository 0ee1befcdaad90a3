from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.egress.access import Access, AccessRefused, Target
from carrel.egress.outbound.budget import CONNECTIONS, PER_MINUTE, REFUSALS, Budget, Meter
from carrel.egress.outbound.rules import EgressLimits


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_defaults_hold_where_nobody_says_anything() -> None:
    budget = Budget(EgressLimits())
    assert (budget.connections, budget.per_minute) == (CONNECTIONS, PER_MINUTE) == (256, 6000)


@given(st.integers(1, 5), st.integers(1, 10), st.lists(st.sampled_from(["enter", "leave", "wait"]), max_size=60))
def test_never_more_at_once_nor_in_any_minute(most: int, rate: int, acts: list[str]) -> None:
    clock = Clock()
    budget = Budget(EgressLimits(most, rate), clock=clock)
    entered: list[float] = []
    running = 0
    for act in acts:
        if act == "wait":
            clock.now += 25
        elif act == "leave" and running:
            budget.leave()
            running -= 1
        elif act == "enter":
            recent = sum(each > clock.now - 60 for each in entered)
            if running < most and recent < rate:
                budget.enter()
                entered.append(clock.now)
                running += 1
            else:
                with pytest.raises(AccessRefused) as refused:
                    budget.enter()
                assert (refused.value.status, refused.value.code, refused.value.retry) == (429, "limit_exceeded", True)
        assert budget.open == running


def test_bytes_are_counted_each_way_and_end() -> None:
    budget = Budget(EgressLimits(download_bytes=100, upload_bytes=10))
    access = Access("s1", "connect", Target("a.test", 443))
    meter = Meter(access, budget)
    meter.sent(10)
    meter.received(100)
    budget.enter()
    with pytest.raises(AccessRefused, match="received its 100 bytes"):
        meter.received(1)
    with pytest.raises(AccessRefused, match="received"):
        budget.enter()
    budget.change(EgressLimits(upload_bytes=10))
    with pytest.raises(AccessRefused, match="sent its 10 bytes"):
        meter.sent(1)
    assert (access.sent, access.received) == (11, 101)
    budget.change(EgressLimits(upload_bytes=3 << 20))
    with pytest.raises(AccessRefused, match="3 MB"):
        meter.sent(3 << 20)


def test_one_connection_may_have_a_limit_of_its_own() -> None:
    access = Access("s1", "connect", Target("git.test", 443))
    meter = Meter(access, Budget(EgressLimits()), most_received=5)
    meter.received(5)
    with pytest.raises(AccessRefused, match=r"git\.test:443"):
        meter.received(1)


def test_refusals_beyond_many_are_counted_and_not_written_one_by_one() -> None:
    now = 0.0
    budget = Budget(EgressLimits(), clock=lambda: now)
    assert [budget.log_refusal() for _ in range(REFUSALS)] == [0] * REFUSALS
    assert [budget.log_refusal() for _ in range(5)] == [None] * 5
    now = 61.0
    assert budget.log_refusal() == 5
    assert budget.log_refusal() == 0


def test_requests_over_open_connections_count_too() -> None:
    budget = Budget(EgressLimits(per_minute=3), clock=lambda: 0.0)
    budget.enter()
    budget.count()
    budget.count()
    with pytest.raises(AccessRefused, match="within a minute"):
        budget.count()
