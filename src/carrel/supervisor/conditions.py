"""The conditions that a process runs under and hands to what it forks: limits, priorities, processors.

Any process of the same user can change them for another, and nothing tells. So whoever waits to run something that must
not know of what ran before is looked at again.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass

from carrel.primitives.libc import io_priority

_LIMITS = tuple(sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}))


@dataclass(frozen=True, slots=True)
class Conditions:
    """What was found."""

    limits: tuple[tuple[int, int], ...]
    priority: int
    io_priority: int
    scheduler: int
    processors: frozenset[int]


def conditions(pid: int = 0) -> Conditions | None:
    """Those of a process, or of this one; None when it has ended."""
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
