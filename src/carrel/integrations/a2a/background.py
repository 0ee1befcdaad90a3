"""Background tasks with one owner: they are cancelled when the owner ends. A failure is logged and affects no other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from types import TracebackType

from carrel.primitives.tasks import cancel

log = logging.getLogger("carrel.a2a")


class Background:
    """Runs tasks inside an `async with` block; at its end, running ones are cancelled and awaited."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def start(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None] | None:
        """Start a task; returns None if the block has ended."""
        if self._closed:
            work.close()
            return None
        task = asyncio.get_running_loop().create_task(self._watched(work, name), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @staticmethod
    async def _watched(work: Coroutine[object, object, None], name: str) -> None:
        try:
            await work
        except Exception:
            log.exception("%s failed", name)

    async def __aenter__(self) -> Background:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        await cancel(list(self._tasks))
