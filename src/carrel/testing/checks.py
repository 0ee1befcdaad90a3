"""Checks, their list, and the report of their outcomes. Runs nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from carrel.providers.base import Capability, Provider
from carrel.testing.harness import Harness

Body = Callable[[Harness], Awaitable[None]]


@dataclass(frozen=True)
class Check:
    """One promise of a provider. `needs` are the capabilities that it requires."""

    name: str
    promise: str
    body: Body
    needs: frozenset[Capability] = frozenset()

    def gaps(self, provider: Provider) -> list[Capability]:
        """Return the needed capabilities that the provider does not promise."""
        return sorted(self.needs - provider.capabilities())


@dataclass(frozen=True)
class Outcome:
    """The outcome of a check. `gaps` are the missing capabilities, each of which the provider must refuse."""

    check: Check
    failure: str | None = None
    gaps: tuple[Capability, ...] = ()
    seconds: float = 0.0

    @property
    def kept(self) -> bool:
        """Whether the promise was kept, or correctly refused."""
        return self.failure is None


@dataclass
class Report:
    """The outcomes of all checks of one provider."""

    provider: str
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every promise was kept."""
        return all(outcome.kept for outcome in self.outcomes)

    @property
    def gaps(self) -> list[Capability]:
        """The missing capabilities, each of which was correctly refused."""
        return sorted({gap for outcome in self.outcomes for gap in outcome.gaps})

    def __str__(self) -> str:
        lines = []
        for outcome in self.outcomes:
            word = "BROKEN" if not outcome.kept else "refused" if outcome.gaps else "kept"
            lines.append(f"{word:8} {outcome.check.name}: {outcome.failure or outcome.check.promise}")
        return f"provider {self.provider}\n" + "\n".join(lines)


CHECKS: list[Check] = []


def check(*needs: Capability) -> Callable[[Body], Body]:
    def declare(body: Body) -> Body:
        name = getattr(body, "__name__", "check")
        CHECKS.append(Check(name, (body.__doc__ or name).strip().splitlines()[0], body, frozenset(needs)))
        return body

    return declare
