"""The end of a process that is known by its pid and start time, and need not be a child of ours."""

from __future__ import annotations

import asyncio
import os
import signal

from carrel.isolation import cgroups


def runs(pid: int, start_time: int) -> bool:
    """Whether the very process still runs."""
    return cgroups.start_time(pid) == start_time != 0


async def end(pid: int, start_time: int, *, patience_s: float = 0.0, deadline_s: float = 30.0) -> None:
    """Wait for a process to end by itself, and when it does not, end it. Raises `TimeoutError` when it lives on."""
    try:
        process = os.pidfd_open(pid)
    except OSError:  # gone, or never was
        return
    loop = asyncio.get_running_loop()
    gone: asyncio.Future[None] = loop.create_future()
    loop.add_reader(process, lambda: None if gone.done() else gone.set_result(None))
    try:
        if not runs(pid, start_time):  # asked again now that the descriptor holds on to it
            return
        if patience_s:
            await asyncio.wait((gone,), timeout=patience_s)
        if not gone.done():
            signal.pidfd_send_signal(process, signal.SIGKILL)
        async with asyncio.timeout(deadline_s):
            await gone
    except ProcessLookupError:
        return
    finally:
        loop.remove_reader(process)
        os.close(process)
