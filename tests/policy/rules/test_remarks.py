from __future__ import annotations

from carrel.policy.rules.remarks import Remark, strictest, strictness


def test_the_first_of_the_strictest_counts() -> None:
    remarks = [Remark("allow", "a"), Remark("ask", "b"), Remark("deny", "c"), Remark("deny", "d"), Remark("ask", "e")]
    assert strictest(remarks) == Remark("deny", "c")
    assert strictest(remarks[:2]) == Remark("ask", "b")
    assert strictest([]) is None
    assert strictness("allow") < strictness("ask") < strictness("deny")
