from __future__ import annotations

from carrel.primitives.backoff import Backoff


def test_pause_doubles_up_to_the_longest_and_starts_again_after_reset() -> None:
    backoff = Backoff(0.5, 3)
    assert [backoff.next_pause() for _ in range(5)] == [0.5, 1.0, 2.0, 3, 3]
    backoff.reset()
    assert backoff.next_pause() == 0.5


def test_many_failures_do_not_overflow() -> None:
    backoff = Backoff(0.1, 60)
    assert [backoff.next_pause() for _ in range(5000)][-1] == 60
