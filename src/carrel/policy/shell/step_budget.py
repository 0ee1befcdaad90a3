"""Limits the work of one decision, counted in steps, so that the answer does not depend on the speed of the machine.

An ordinary text takes a few steps per character. All code that reads or walks a text spends steps here. When none is
left, the text is too complex to decide, and a person must look at it.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_TEXT = 65_536
"""The most characters of a shell text."""
SPARE_STEPS, STEPS_PER_CHARACTER = 30_000, 32


class TooComplex(Exception):
    """A decision takes more steps than the length of its text allows."""


def size_of(command: str | Sequence[str]) -> int:
    """Return the number of characters of a command."""
    return len(command) if isinstance(command, str) else sum(len(word) + 1 for word in command)


class StepBudget:
    """The steps that one decision has spent, and the most that it may spend."""

    __slots__ = ("most", "spent")

    def __init__(self, characters: int = MAX_TEXT, *, spare: int = SPARE_STEPS):
        self.most = spare + STEPS_PER_CHARACTER * characters
        self.spent = 0

    def spend(self, steps: int = 1) -> None:
        """Spend steps. Raises `TooComplex` if there are not enough left."""
        self.spent += steps
        if self.spent > self.most:
            raise TooComplex("it takes too many steps to decide")
