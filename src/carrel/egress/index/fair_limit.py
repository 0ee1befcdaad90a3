"""A limit on how many run at once, shared fairly by those who ask. For one event loop.

Whoever has fewer permits than are free may get one more. So a single asker gets at most half of all permits, and the
next asker always finds one free.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable
from types import TracebackType


class FairLimit:
    """A number of permits, for all askers together."""

    def __init__(self, most: int):
        self._free = most
        self._taken: Counter[Hashable] = Counter()
        self._waiting: dict[Permit, asyncio.Future[None]] = {}

    def permit(self) -> Permit:
        """A permit to join and then to wait for, as an asynchronous context manager."""
        return Permit(self)

    async def enter(self, permit: Permit) -> None:
        """Wait until the permit is given."""
        future = self._waiting[permit] = asyncio.get_running_loop().create_future()
        self.give()
        try:
            await future
        except BaseException:
            self._waiting.pop(permit, None)
            self.leave(permit)
            raise

    def leave(self, permit: Permit) -> None:
        """Give the permit back, if it was given."""
        if permit.charged:
            (who,) = permit.charged
            permit.charged = ()
            self._free += 1
            self._taken[who] -= 1
            if not self._taken[who]:
                del self._taken[who]
            self.give()

    def give(self) -> None:
        """Give the permits that are free: first to whoever has fewest, then in the order of asking."""
        while self._waiting:
            wanted = ((self._taken[who], who, permit) for permit in self._waiting for who in permit.who)
            taken, who, permit = min(wanted, key=lambda each: each[0], default=(self._free, None, None))
            if permit is None or taken >= self._free:
                return
            future = self._waiting.pop(permit)
            if not future.done():
                self._free -= 1
                self._taken[who] += 1
                permit.charged = (who,)
                future.set_result(None)


class Permit:
    """One permit, for all who join it. It counts for the one of them who has fewest."""

    def __init__(self, limit: FairLimit):
        self._limit = limit
        self.who: dict[Hashable, None] = {}
        self.charged: tuple[()] | tuple[Hashable] = ()
        """For whom it counts, once it is given."""

    def join(self, who: Hashable) -> None:
        """Add one more for whom it may count."""
        self.who[who] = None
        self._limit.give()

    async def __aenter__(self) -> None:
        await self._limit.enter(self)

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._limit.leave(self)
