from __future__ import annotations

from carrel.policy.verdict import Verdict, strictest


def test_the_first_of_the_strictest_counts() -> None:
    verdicts = [
        Verdict("allow", "a"),
        Verdict("ask", "b"),
        Verdict("deny", "c"),
        Verdict("deny", "d"),
        Verdict("ask", "e"),
    ]
    assert strictest(verdicts) == Verdict("deny", "c")
    assert strictest(verdicts[:2]) == Verdict("ask", "b")
    assert strictest([]) is None
    assert verdicts[0].strictness < verdicts[1].strictness < verdicts[2].strictness
