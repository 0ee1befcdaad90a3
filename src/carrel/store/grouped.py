"""Writes of several callers in one transaction: while one is committed, the next ones gather. Knows no table but that
of the events, which are written with the changes that they tell of.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sqlalchemy.engine import Connection

from carrel.models.events import EventDraft
from carrel.store.database import Database
from carrel.store.events import stage

T = TypeVar("T")
Change = Callable[[Connection], tuple[T, Sequence[EventDraft]]]
"""A part of a transaction: returns its result and the events that are written with it."""

MOST_TOGETHER = 200
SHORT = 8
"""Changes that cost less on the event loop than the way to another thread and back, see `Database.write_soon`."""
_Waiting = tuple[str, Change[Any], "asyncio.Future[Any]", bool]


class GroupedWrites:
    """Each write is atomic, and none sees half of another. When one fails, the others of its group are done one by one,
    so that it fails alone.
    """

    def __init__(self, database: Database, *, short: int = SHORT):
        """`short`: up to how many changes are written on the event loop."""
        self._database = database
        self._short = short
        self._waiting: list[_Waiting] = []
        self._task: asyncio.Task[None] | None = None

    async def write(self, key: str, change: Change[T], *, large: bool = False) -> T:
        """Do a change, and return its result when it is committed. `key` names what it locks: each group takes its
        locks in the order of the keys, so that those of two servers do not wait for each other.

        `large`: it would delay the event loop. A caller that is cancelled does not stop it.
        """
        return await self.put(key, change, large=large)

    def put(self, key: str, change: Change[T], *, large: bool = False) -> asyncio.Future[T]:
        """Do a change as `write` does; the future is done when it is committed."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((key, change, done, large))
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())
        return done

    async def close(self) -> None:
        """Wait until everything is written."""
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting[:MOST_TOGETHER], self._waiting[MOST_TOGETHER:]
            group.sort(key=lambda each: each[0])
            try:
                results = await self._together(group)
            except Exception as error:
                if len(group) == 1:
                    _fail(group[0], error)
                    continue
                for each in group:
                    await self._alone(each)
            else:
                for (_, _, done, _), result in zip(group, results, strict=True):
                    if not done.done():
                        done.set_result(result)

    async def _together(self, group: Sequence[_Waiting]) -> list[Any]:
        if len(group) <= self._short and not any(large for *_, large in group):
            return await self._database.write_soon(lambda connection: _all(connection, group))
        return await self._database.write(lambda connection: _all(connection, group))

    async def _alone(self, waiting: _Waiting) -> None:
        try:
            results = await self._database.write(lambda connection: _all(connection, [waiting]))
        except Exception as error:
            _fail(waiting, error)
        else:
            if not waiting[2].done():
                waiting[2].set_result(results[0])


def _all(connection: Connection, group: Sequence[_Waiting]) -> list[Any]:
    results: list[Any] = []
    drafts: list[EventDraft] = []
    for _, change, *_ in group:
        result, happened = change(connection)
        results.append(result)
        drafts += happened
    stage(connection, drafts)
    return results


def _fail(waiting: _Waiting, error: Exception) -> None:
    if not waiting[2].done():
        waiting[2].set_exception(error)
