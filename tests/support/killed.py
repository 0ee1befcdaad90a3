"""A control plane that was killed, as far as one that lives in this process can be."""

from __future__ import annotations

import asyncio

from carrel.control.plane import ControlPlane
from carrel.primitives.tasks import cancel
from carrel.providers.zygote_provider import ZygoteProvider


async def killed(plane: ControlPlane) -> None:
    """It does nothing any more by itself, and its zygotes see it gone: who closes after it need not wait for it."""
    if plane._upkeep_task is not None:
        plane._upkeep_task.cancel()
        await asyncio.gather(plane._upkeep_task, return_exceptions=True)
    plane._slots._closing = True  # it starts no more of them
    await cancel([*plane._slots._learning, *plane._slots._tasks.values()])
    for provider in plane.providers.values():
        if isinstance(provider, ZygoteProvider):
            provider._zygote._hang_up()
