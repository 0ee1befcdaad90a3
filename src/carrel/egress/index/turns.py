"""Turns at something that only so many can use at once, so that nobody takes them all.

Who has fewer turns than are free may have one more: alone, he gets half of all, and however much the first few take,
the next who comes finds one free. Knows nothing of what a turn is for. For one event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable
from types import TracebackType


class Turns:
    """So many turns, for all together."""

    def __init__(self, most: int):
        self._free = most
        self._taken: Counter[Hashable] = Counter()
        self._waiting: dict[Turn, asyncio.Future[None]] = {}

    def turn(self) -> Turn:
        """A turn that somebody has to join before it can come; enter it to wait for it."""
        return Turn(self)

    async def enter(self, turn: Turn) -> None:
        """Wait until it is the turn's time."""
        future = self._waiting[turn] = asyncio.get_running_loop().create_future()
        self.give()
        try:
            await future
        except BaseException:
            self._waiting.pop(turn, None)
            self.leave(turn)
            raise

    def leave(self, turn: Turn) -> None:
        """The turn is over, if it ever came."""
        if turn.charged:
            (who,) = turn.charged
            turn.charged = ()
            self._free += 1
            self._taken[who] -= 1
            if not self._taken[who]:
                del self._taken[who]
            self.give()

    def give(self) -> None:
        """Give every turn whose time has come: to who has fewest first, then to who came first."""
        while self._waiting:
            wanted = ((self._taken[who], who, turn) for turn in self._waiting for who in turn.who)
            taken, who, turn = min(wanted, key=lambda each: each[0], default=(self._free, None, None))
            if turn is None or taken >= self._free:
                return
            future = self._waiting.pop(turn)
            if not future.done():
                self._free -= 1
                self._taken[who] += 1
                turn.charged = (who,)
                future.set_result(None)


class Turn:
    """One turn, for the sake of everybody who joins it. It counts for the one of them who has fewest."""

    def __init__(self, turns: Turns):
        self._turns = turns
        self.who: dict[Hashable, None] = {}
        self.charged: tuple[()] | tuple[Hashable] = ()
        """For whom it counts, once it has come."""

    def join(self, who: Hashable) -> None:
        """One more wants it, whom it may count for."""
        self.who[who] = None
        self._turns.give()

    async def __aenter__(self) -> None:
        await self._turns.enter(self)

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._turns.leave(self)
