"""How much work one decision may take, counted in steps: the answer must not depend on how fast a machine is.

An ordinary text takes a few steps for each of its characters. Everything that reads or walks a text spends steps here;
past the last one the text is too complex to decide, and a person must look.
"""

from __future__ import annotations

from collections.abc import Sequence

SPARE_STEPS, STEPS_PER_CHARACTER = 30_000, 32


class TooComplex(Exception):
    """A decision takes more steps than the length of its text allows for."""


def size_of(command: str | Sequence[str]) -> int:
    """How many characters a command has."""
    return len(command) if isinstance(command, str) else sum(len(word) + 1 for word in command)


class StepBudget:
    """The steps that one decision has taken, and may take."""

    __slots__ = ("most", "spent")

    def __init__(self, characters: int = 65_536, *, spare: int = SPARE_STEPS):
        self.most = spare + STEPS_PER_CHARACTER * characters
        self.spent = 0

    def spend(self, steps: int = 1) -> None:
        """Take steps. Raises `TooComplex` when there are not so many left."""
        self.spent += steps
        if self.spent > self.most:
            raise TooComplex("it takes too many steps to decide")
