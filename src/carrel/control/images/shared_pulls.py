"""Pulls that several callers wait for: each reference is pulled once at a time, and everybody sees the progress."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from carrel.images.storage import LayerProgress, Progress, StoredImage
from carrel.primitives import tasks

Fetch = Callable[[Progress], Awaitable[StoredImage]]


class _SharedPull:
    def __init__(self, fetch: Fetch):
        self.listeners: list[Progress] = []
        self.waiting = 0
        self.task = asyncio.ensure_future(fetch(self._say))

    def _say(self, progress: LayerProgress) -> None:
        for listener in self.listeners:
            listener(progress)


class SharedPulls:
    """The pulls that are under way."""

    def __init__(self) -> None:
        self._under_way: dict[str, _SharedPull] = {}

    async def join(self, key: str, fetch: Fetch, progress: Progress) -> StoredImage:
        """Wait for the pull of a key, which is started if none is under way. It ends when nobody waits any more."""
        pull = self._under_way.get(key)
        if pull is None:
            pull = self._under_way[key] = _SharedPull(fetch)
        pull.waiting += 1
        pull.listeners.append(progress)
        try:
            return await asyncio.shield(pull.task)
        finally:
            pull.waiting -= 1
            pull.listeners.remove(progress)
            if pull.task.done() or pull.waiting == 0:
                if self._under_way.get(key) is pull:
                    del self._under_way[key]
                await tasks.cancel([pull.task])

    async def close(self) -> None:
        """End all pulls."""
        await tasks.cancel([pull.task for pull in self._under_way.values()])
