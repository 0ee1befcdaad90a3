"""The verdict on an operation: one type, from the rules of a policy to the response of the API. Values only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from carrel.models import ExplainedPart, Explanation

Decision = Literal["allow", "deny", "ask"]
Kind = Literal["shell", "file", "network", "mcp"]
_STRICTNESS: dict[Decision, int] = {"allow": 0, "ask": 1, "deny": 2}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Allow, ask or deny, with the reason, the rule or key, its document (`source`) and what to do instead (`hint`).

    `approval` is the id of the requested approval. `parts` has the verdict on each part of the operation.
    """

    verdict: Decision = "allow"
    reason: str = ""
    rule: str | None = None
    source: str | None = None
    hint: str | None = None
    approval: str | None = None
    parts: tuple[VerdictPart, ...] = ()

    @property
    def allows(self) -> bool:
        """Whether the operation may run."""
        return self.verdict == "allow"

    @property
    def asks(self) -> bool:
        """Whether a person has to decide."""
        return self.verdict == "ask"

    @property
    def denies(self) -> bool:
        """Whether the operation is refused."""
        return self.verdict == "deny"

    @property
    def strictness(self) -> int:
        """Deny is stricter than ask, ask is stricter than allow."""
        return _STRICTNESS[self.verdict]


@dataclass(frozen=True, slots=True)
class VerdictPart:
    """One thing that an operation would do, and the verdict on it. `via` names the commands that run it."""

    kind: Kind
    text: str
    verdict: Verdict
    via: tuple[str, ...] = ()


ALLOWED, DENIED = Verdict(), Verdict("deny")


def strictest(verdicts: Iterable[Verdict]) -> Verdict | None:
    """Return the first of the strictest verdicts; None if there are none."""
    return max(verdicts, key=lambda each: each.strictness, default=None)


def explained(verdict: Verdict) -> Explanation:
    """Convert a verdict with its parts for the API and the command line."""
    return Explanation(
        verdict=verdict.verdict,
        reason=verdict.reason,
        rule=verdict.rule,
        parts=[
            ExplainedPart(
                kind=part.kind,
                text=part.text,
                verdict=part.verdict.verdict,
                reason=part.verdict.reason,
                rule=part.verdict.rule,
                source=part.verdict.source,
                via=list(part.via),
            )
            for part in verdict.parts
        ],
    )
