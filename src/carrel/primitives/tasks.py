"""Ending the tasks of an event loop, and waiting for a descriptor."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any


async def cancel(tasks: Iterable[asyncio.Future[Any] | None]) -> None:
    """Cancel tasks and wait until all have ended. Their errors are dropped; None is skipped."""
    ending = [task for task in tasks if task is not None]
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


async def readable(descriptor: int) -> None:
    """Wait until a descriptor can be read. Nobody else may wait for it meanwhile."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
