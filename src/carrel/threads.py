"""Runs blocking work in a thread, and never leaves it behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def run_to_end(
    work: Callable[[], T], undo: Callable[[T], None] | None = None, stop: Callable[[], None] | None = None
) -> T:
    """Run blocking work in a thread. A caller that is cancelled still waits for its end, because the work may use
    things that the caller closes afterwards: `stop` is then called to end it early, and `undo` is given its result.
    """
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if stop is not None:
            stop()
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if undo is not None and task.exception() is None:
            undo(task.result())
        raise
