"""The table of trust: the least isolation and the default network of each level. Chooses nothing itself.

`docs/reference/trust.md` is made from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from carrel.models import Network, Trust


@dataclass(frozen=True)
class TrustRule:
    """One level of trust. `network` is for requests that name none; None means the setting `sandbox.network`."""

    meant_for: str
    least_level: int
    network: Network | None
    why: str


RULES = {
    Trust.HIGH: TrustRule(
        meant_for="code you wrote",
        least_level=0,
        network=None,
        why="You would run this code by hand. `auto` still takes the strongest provider; only here a caller may name "
        "`process`, which has the network of the host, where the operator allows it.",
    ),
    Trust.MEDIUM: TrustRule(
        meant_for="the commands of an agent",
        least_level=1,
        network=None,
        why="An agent makes mistakes and can be misled. It needs walls, and the network that the operator gives to "
        "every agent.",
    ),
    Trust.LOW: TrustRule(
        meant_for="code you believe to be hostile",
        least_level=2,
        network=Network.NONE,
        why="A bug of the host's kernel must not be enough to break out. A network that was meant for ordinary agents "
        "would let hostile code send out what it reads, so somebody has to name one for it.",
    ),
}


def stricter(one: Trust, other: Trust) -> Trust:
    """Return the level that asks for more isolation."""
    return max(one, other, key=lambda each: RULES[each].least_level)
