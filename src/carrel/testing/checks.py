"""What a check is, where checks are declared, and how the outcome of many is told. Runs nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from carrel.providers.base import Capability, Provider
from carrel.testing.harness import Harness

Body = Callable[[Harness], Awaitable[None]]


@dataclass(frozen=True)
class Check:
    """One promise. `needs` are the capabilities without which it cannot be kept."""

    name: str
    promise: str
    body: Body
    needs: frozenset[Capability] = frozenset()

    def gaps(self, provider: Provider) -> list[Capability]:
        """What the provider would have to promise and does not."""
        return sorted(self.needs - provider.capabilities())


@dataclass(frozen=True)
class Outcome:
    """How a check went. `gaps` is not empty where the provider refused, as it must, what it does not promise."""

    check: Check
    failure: str | None = None
    gaps: tuple[Capability, ...] = ()
    seconds: float = 0.0

    @property
    def kept(self) -> bool:
        """Whether the promise was kept, or its refusal was."""
        return self.failure is None


@dataclass
class Report:
    """What a provider kept and what not."""

    provider: str
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether everything was kept."""
        return all(outcome.kept for outcome in self.outcomes)

    @property
    def gaps(self) -> list[Capability]:
        """The capabilities that were missing, each refused as it should be."""
        return sorted({gap for outcome in self.outcomes for gap in outcome.gaps})

    def __str__(self) -> str:
        lines = []
        for outcome in self.outcomes:
            word = "BROKEN" if not outcome.kept else "refused" if outcome.gaps else "kept"
            lines.append(f"{word:8} {outcome.check.name}: {outcome.failure or outcome.check.promise}")
        return f"provider {self.provider}\n" + "\n".join(lines)


CHECKS: list[Check] = []


def check(*needs: Capability) -> Callable[[Body], Body]:
    """Declare a check."""

    def declare(body: Body) -> Body:
        name = getattr(body, "__name__", "check")
        CHECKS.append(Check(name, (body.__doc__ or name).strip().splitlines()[0], body, frozenset(needs)))
        return body

    return declare
