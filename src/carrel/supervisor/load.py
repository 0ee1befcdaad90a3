"""How much is going on in the sandbox: its processes, and the memory that they and its memory file systems hold.

Reads what the kernel tells anybody; nothing is kept between two looks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from carrel.supervisor.reaper import descendants, processes

_PAGE = os.sysconf("SC_PAGE_SIZE")
_STOPPED = {b"T", b"t"}


@dataclass(frozen=True, slots=True)
class Load:
    """What was found. `memory_bytes` is at most what is held: pages that a fork shares count for each process."""

    processes: int
    memory_bytes: int
    stopped: bool
    """Whether a process was stopped, so that whoever waits for it would wait for long."""


def measure(pid: int, memory_places: Sequence[str] = ()) -> Load:
    """The load of a process and all below it, and of these memory file systems."""
    found = [pid, *descendants(pid, processes())]
    memory, stopped = 0, False
    for each in found:
        memory += _private(each)
        stopped = stopped or _state(each) in _STOPPED
    return Load(len(found), memory + sum(map(_used, memory_places)), stopped)


def _private(pid: int) -> int:
    fields = _read(f"/proc/{pid}/statm").split()
    return (int(fields[1]) - int(fields[2])) * _PAGE if len(fields) > 2 else 0


def _state(pid: int) -> bytes:
    return _read(f"/proc/{pid}/stat").rpartition(b")")[2].strip()[:1]


def _read(path: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""  # it has ended meanwhile
    try:
        return os.read(descriptor, 4096)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def _used(place: str) -> int:
    try:
        facts = os.statvfs(place)
    except OSError:
        return 0
    return (facts.f_blocks - facts.f_bfree) * facts.f_frsize
