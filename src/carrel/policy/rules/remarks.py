"""What one document says of one thing: a verdict with its reason. Values only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Answer = Literal["allow", "deny", "ask"]
_STRICTNESS: dict[Answer, int] = {"allow": 0, "ask": 1, "deny": 2}


@dataclass(frozen=True, slots=True)
class Remark:
    """A verdict, the rule or key that gave it, where that stands, why, and what to do instead."""

    verdict: Answer
    reason: str
    rule: str | None = None
    source: str | None = None
    hint: str | None = None


def strictest(remarks: Iterable[Remark]) -> Remark | None:
    """The first of the strictest; None of none."""
    return max(remarks, key=lambda each: _STRICTNESS[each.verdict], default=None)


def strictness(verdict: Answer) -> int:
    """Denied above asked above allowed."""
    return _STRICTNESS[verdict]
