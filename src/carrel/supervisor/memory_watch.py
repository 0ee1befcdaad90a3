"""Holds a sandbox to its memory where the host's kernel cannot: in gVisor, whose processes are one process to the host.

The limit of the host is the wall behind this one, a little higher: a sandbox that reaches it is ended. So this looks
more often the nearer the limit is, and kills the largest process before that.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import suppress

from carrel.primitives.kernel_files import private_bytes
from carrel.supervisor.load import file_system_bytes
from carrel.supervisor.reaper import processes

GROWTH = 1 << 30
"""The most bytes a second by which the memory of a sandbox is expected to grow."""
SHORTEST_S, LONGEST_S = 0.02, 1.0


async def watch_memory(limit: int, places: Sequence[str]) -> None:
    """Keep all processes and these memory file systems together below a number of bytes, as long as the loop runs."""
    while True:
        left = limit - _enforce(limit, places)
        await asyncio.sleep(min(LONGEST_S, max(SHORTEST_S, left / GROWTH)))


def _enforce(limit: int, places: Sequence[str]) -> int:
    """Return the memory in use. If it is more than the limit, the largest process is killed."""
    own = os.getpid()
    used = {pid: private_bytes(f"/proc/{pid}") for pid in processes()}
    total = sum(used.values()) + sum(map(file_system_bytes, places))
    used.pop(own, None)
    if total > limit and used:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(max(used, key=lambda pid: used[pid]), signal.SIGKILL)
    return total
