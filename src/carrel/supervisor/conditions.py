"""Limits, priorities and processors of a process, which its children inherit.

Any process of the same user can change them for another one, without notice. So they are compared again before a
waiting process runs code that must not be affected by earlier code.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass

from carrel.primitives.libc import io_priority

_LIMITS = tuple(sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}))


@dataclass(frozen=True, slots=True)
class Conditions:
    """Everything that a child inherits and another process can change."""

    limits: tuple[tuple[int, int], ...]
    priority: int
    io_priority: int
    scheduler: int
    processors: frozenset[int]


def conditions(pid: int = 0) -> Conditions | None:
    """Return the conditions of a process (0: of this one), or None when it has ended."""
    try:
        return Conditions(
            tuple(resource.prlimit(pid, each) for each in _LIMITS),
            os.getpriority(os.PRIO_PROCESS, pid),
            io_priority(pid),
            os.sched_getscheduler(pid),
            frozenset(os.sched_getaffinity(pid)),
        )
    except ProcessLookupError:
        return None
