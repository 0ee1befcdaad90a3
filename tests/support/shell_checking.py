"""Compares what really ran with what was predicted."""

from __future__ import annotations

from collections.abc import Sequence

from carrel.policy.shell import Argument, Unknown, base
from carrel.policy.shell.finder import Found

SECOND = ("the text does not follow the grammar", "two readings of the text differ")


def fits(predicted: Sequence[Argument], ran: Sequence[str]) -> bool:
    """Whether a command that ran is one that was predicted."""
    places = {0}
    for argument in predicted:
        if not isinstance(argument, Unknown):
            places = {at + 1 for at in places if at < len(ran) and ran[at] == argument}
        elif argument.count == "any":
            places = {more for at in places for more in range(at, len(ran) + 1)}
        else:
            further: set[int] = set()
            for at in places:
                while at < len(ran) and argument.may_be(ran[at]):
                    at += 1
                    further.add(at)
                    if argument.count == "one":
                        break
            places = further
        if not places:
            return False
    return len(ran) in places


def is_judged(found: Found) -> bool:
    """Whether the prediction claims to be complete.

    What only the second reading objects to is judged as if it had not: the first must hold on its own.
    """
    return not found.opaque and all(reason.startswith(SECOND) for reason in found.asks)


def unpredicted(found: Found, ran: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The commands that ran and were not predicted; none when the text asks anyway."""
    if not is_judged(found):
        return []
    predicted = [
        (base(first), *command.arguments[1:])
        for command in found.commands
        if isinstance(first := command.arguments[0], str)
    ]
    return [each for each in ran if not any(fits(one, each) for one in predicted)]
