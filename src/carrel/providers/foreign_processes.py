"""Checks, stops and ends processes that are known by PID, and need not be children of this process."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress

from carrel.isolation import cgroups
from carrel.isolation.watchdog import below, children_by_parent
from carrel.primitives.kernel_files import stat_fields

MOST_LOOKS = 200
"""How often the list of processes is read until all of them are stopped."""


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


def stop_below(pid: int) -> bool:
    """Stop every process below this one; return whether all are stopped. Blocking.

    A parent is stopped before its children, so it does not learn that they are stopped. One that is not stopped yet may
    start others or continue them: so it is repeated until all are stopped.
    """
    for _ in range(MOST_LOOKS):
        running = [each for each in below(pid, children_by_parent())[1:] if _state(each) not in _NOT_RUNNING]
        if not running:
            return True
        for each in running:
            _send(each, signal.SIGSTOP)
        time.sleep(0.002)
    return False


def continue_below(pid: int) -> None:
    """Continue the stopped processes below this one, children first."""
    for each in reversed(below(pid, children_by_parent())[1:]):
        _send(each, signal.SIGCONT)


def kill_stopped(pid: int) -> None:
    """Kill the stopped processes below this one."""
    for each in below(pid, children_by_parent())[1:]:
        if _state(each) == b"T":
            _send(each, signal.SIGKILL)


_NOT_RUNNING = frozenset({b"T", b"t", b"Z", b"X", b""})


def _state(pid: int) -> bytes:
    fields = stat_fields(f"/proc/{pid}")
    return fields[0] if fields else b""


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
