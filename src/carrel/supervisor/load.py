"""Measures the load of a sandbox: its processes, and the memory that they and its memory file systems use."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from carrel.primitives.kernel_files import private_bytes, stat_fields
from carrel.supervisor.reaper import descendants, processes

_STOPPED = ([b"T"], [b"t"])


@dataclass(frozen=True, slots=True)
class SandboxLoad:
    """A measurement. `memory_bytes` is an upper bound: pages that processes share count for each of them."""

    processes: int
    memory_bytes: int
    stopped: bool
    """Whether a process was stopped by a signal, so waiting for it could take forever."""


def measure(pid: int, memory_places: Sequence[str] = ()) -> SandboxLoad:
    """Measure a process with all its descendants, and these memory file systems."""
    found = [pid, *descendants(pid, processes())]
    memory, stopped = 0, False
    for each in found:
        memory += private_bytes(f"/proc/{each}")
        stopped = stopped or stat_fields(f"/proc/{each}")[:1] in _STOPPED
    return SandboxLoad(len(found), memory + sum(map(file_system_bytes, memory_places)), stopped)


def file_system_bytes(place: str) -> int:
    """Return the bytes that the files of a file system use."""
    try:
        facts = os.statvfs(place)
    except OSError:
        return 0
    return (facts.f_blocks - facts.f_bfree) * facts.f_frsize
