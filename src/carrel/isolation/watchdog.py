"""What no cgroup and no quota holds: looks at a sandbox's processes from outside, and kills as the kernel would.

Memory, where no cgroup can be had; and disk space of files that were deleted but are still held.

The kernel holds each single process to the limit (`RLIMIT_DATA`); this adds them up. It is coarser than a cgroup: a
burst between two looks is seen late. `carrel doctor` says which of the two a host has.
"""

from __future__ import annotations

import os
import signal
import stat
from dataclasses import dataclass

INTERVAL_S = 0.1
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Watched:
    """A sandbox whose memory is watched: its first process, its limit, and how often it was over it."""

    pid: int
    limit: int
    kills: int = 0
    used: int = 0


def look(watched: list[Watched], proc: str = "/proc") -> None:
    """Add up each sandbox's private memory; where it is over the limit, kill its largest process but the first."""
    parents = _parents(proc)
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    for sandbox in watched:
        pending = [sandbox.pid]
        sizes: dict[int, int] = {}
        while pending:
            pid = pending.pop()
            sizes[pid] = _private_bytes(proc, pid)
            pending += children.get(pid, ())
        sandbox.used = sum(sizes.values())
        if sandbox.used > sandbox.limit:
            del sizes[sandbox.pid]
            largest = max(sizes, key=sizes.__getitem__, default=0)
            if largest:
                try:
                    os.kill(largest, signal.SIGKILL)
                except ProcessLookupError:
                    continue
                sandbox.kills += 1


def held(pid: int, device: int, proc: str = "/proc") -> int:
    """Bytes of files on `device` that have no name any more but are held open or mapped by processes below `pid`."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents(proc).items():
        children.setdefault(parent, []).append(child)
    found: dict[int, int] = {}
    pending = [pid]
    while pending:
        current = pending.pop()
        pending += children.get(current, ())
        threads = _threads(f"{proc}/{current}")
        for thread in threads:  # each may have descriptors of its own; memory is that of all
            _held_open(f"{thread}/fd", device, found)
        any(_held_mapped(f"{thread}/maps", device, found) for thread in threads)
    return sum(found.values())


def _held_open(directory: str, device: int, found: dict[int, int]) -> None:
    try:
        names = os.listdir(directory)
    except OSError:
        return
    for name in names:
        try:
            file = os.stat(f"{directory}/{name}")
        except OSError:
            continue
        if file.st_dev == device and file.st_nlink == 0 and stat.S_ISREG(file.st_mode):
            found[file.st_ino] = file.st_blocks * 512


def _held_mapped(path: str, device: int, found: dict[int, int]) -> bool:
    """False when there is no memory to look at: that of a thread which has ended."""
    wanted = f"{os.major(device):02x}:{os.minor(device):02x}".encode()
    try:
        with open(path, "rb") as file:
            lines = file.read(4 * 1024 * 1024).splitlines()
    except OSError:
        return False
    for line in lines:
        if line.endswith(b"(deleted)"):
            fields = line.split(None, 5)
            if len(fields) == 6 and fields[3] == wanted:
                first, _, last = fields[0].partition(b"-")
                inode = int(fields[4])
                found[inode] = max(found.get(inode, 0), int(last, 16) - int(first, 16))
    return bool(lines)


def _parents(proc: str) -> dict[int, int]:
    found: dict[int, int] = {}
    for name in os.listdir(proc):
        if name.isdigit():
            fields = _read(f"{proc}/{name}/stat").rpartition(b")")[2].split()
            if len(fields) > 1:
                found[int(name)] = int(fields[1])
    return found


def _private_bytes(proc: str, pid: int) -> int:
    own = _private(f"{proc}/{pid}")
    # Its first thread may have ended before the others: what is told of the process is then that it has nothing.
    return own or max(map(_private, _threads(f"{proc}/{pid}")), default=0)


def _private(place: str) -> int:
    fields = _read(f"{place}/statm").split()
    return max(0, int(fields[1]) - int(fields[2])) * _PAGE if len(fields) > 2 else 0


def _threads(process: str) -> list[str]:
    try:
        return [f"{process}/task/{name}" for name in os.listdir(f"{process}/task")]
    except OSError:
        return []


def _read(path: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, 4096)
    except OSError:
        return b""
    finally:
        os.close(descriptor)
