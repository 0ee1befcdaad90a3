"""Checks and ends processes that are known by PID and start time, and need not be children of this process."""

from __future__ import annotations

import asyncio
import os
import signal

from carrel.isolation import cgroups


def runs(pid: int, start_time: int) -> bool:
    """Whether this process still runs; a later process with the same PID does not count."""
    return cgroups.start_time(pid) == start_time != 0


async def end(pid: int, start_time: int, *, patience_s: float = 0.0, deadline_s: float = 30.0) -> None:
    """Wait `patience_s` for a process to end, then kill it. Raises `TimeoutError` if it runs `deadline_s` later."""
    try:
        process = os.pidfd_open(pid)
    except OSError:  # there is no such process
        return
    loop = asyncio.get_running_loop()
    gone: asyncio.Future[None] = loop.create_future()
    loop.add_reader(process, lambda: None if gone.done() else gone.set_result(None))
    try:
        if not runs(pid, start_time):  # checked after opening the descriptor, so the PID cannot change its meaning
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
