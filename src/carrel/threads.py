"""Work in a thread that nobody loses sight of. Knows nothing of what is done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def whole(work: Callable[[], T], undo: Callable[[T], None] | None = None) -> T:
    """Work in a thread that is waited for even when nobody wants it any more: it may still use what is closed after it.
    What it made is then undone.
    """
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if undo is not None and task.exception() is None:
            undo(task.result())
        raise
