"""Limits the memory of sandboxes where no cgroup can: scans processes from outside, and kills as the kernel would. It
also measures the disk space of files that were deleted but are still open.

The kernel limits each single process (`RLIMIT_DATA`). `enforce_limits` adds up the private memory of all processes, the
memory file systems, System V segments and other shared memory that `count` found. It is coarser than a cgroup: a burst
between two scans is seen late, and memory of the kernel itself is not seen. `carrel doctor` says which of the two a
host has. Sockets are limited by their number: the system call filter lets no program enlarge their buffers.
"""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from carrel.isolation import linux
from carrel.primitives.kernel_files import private_bytes, read_if_there, stat_fields

INTERVAL_S = 0.1
COUNT_INTERVAL_S = 5.0
"""Shared memory is counted this often, and whenever that of the whole machine has changed by `COUNT_STEP`."""
COUNT_STEP = 1024 * 1024
MOST_ENTRIES = 65_536
"""How many descriptors and maps are read in one sandbox. A sandbox with more counts as over its limit."""
SOCKET_BYTES = 2 * 212_992
FEWEST_SOCKETS = 256
_PATIENCE = 10


@dataclass(frozen=True)
class Shared:
    """Shared memory of a sandbox: by process and inode, the bytes of each file of it that is mapped or open.

    `uncountable` is the process with the most descriptors and maps if there were too many to read, else 0.
    """

    processes: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    uncountable: int = 0

    def files(self, alive: Collection[int]) -> dict[int, int]:
        """Return the bytes of each file, by inode, that the processes in `alive` have mapped or open."""
        found: dict[int, int] = {}
        for pid in alive:
            for inode, size in self.processes.get(pid, {}).items():
                found[inode] = max(size, found.get(inode, 0))
        return found


@dataclass
class WatchedSandbox:
    """A sandbox whose memory is watched: its first process, its limit, and how often it exceeded it.

    `mounts` are descriptors of its memory file systems, `segments` that of the kernel's list of its System V segments.
    Without `own_network`, its sockets cannot be distinguished from the host's.
    """

    pid: int
    limit: int
    kills: int = 0
    used: int = 0
    peak: int = 0
    cpu_ticks: int = 0
    own_network: bool = False
    segments: int = -1
    mounts: Sequence[int] = ()
    shared: Shared = Shared()
    fresh: bool = False
    victim: int = 0
    patience: int = 0

    def take_count(self, shared: Shared, kills: int) -> None:
        """Store a count that was made after `kills` kills. It is outdated if there was another kill since."""
        self.shared = shared
        self.fresh = kills == self.kills

    def close(self) -> None:
        for descriptor in (self.segments, *self.mounts):
            if descriptor >= 0:
                os.close(descriptor)
        self.segments, self.mounts = -1, ()


def enforce_limits(watched: Sequence[WatchedSandbox], proc: str = "/proc") -> bool:
    """Add up the memory of each sandbox. If it exceeds the limit, kill its largest process, never the first one.

    Counted shared memory may be free by now, so it is a reason to kill only in the scan right after the count. Returns
    whether a new count is needed.
    """
    wanted = False
    children, ticks = _scan(proc)
    for sandbox in watched:
        members = below(sandbox.pid, children)
        # A process that has ended counts in its parent. In between it counts in none of the two, hence the maximum.
        sandbox.cpu_ticks = max(sandbox.cpu_ticks, sum(ticks.get(pid, 0) for pid in members))
        sizes = {pid: _private_bytes(proc, pid) for pid in members}
        sizes = {pid: size for pid, size in sizes.items() if size}  # an ended process has no memory
        shared = sandbox.shared
        own = sum(sizes.values()) + _mounted(sandbox.mounts) + _segments(sandbox.segments)
        sandbox.used = own + sum(shared.files(sizes).values())
        sandbox.peak = max(sandbox.peak, sandbox.used)
        fresh, sandbox.fresh = sandbox.fresh, False
        sizes.pop(sandbox.pid, None)
        if sandbox.patience and _lives(proc, sandbox.victim):  # it is freeing its memory; kill no other meanwhile
            sandbox.patience -= 1
            victim = 0
        elif sandbox.own_network and _sockets(proc, sandbox.pid) > max(FEWEST_SOCKETS, sandbox.limit // SOCKET_BYTES):
            victim = max(sizes, key=lambda pid: _open_files(proc, pid), default=0)
        elif fresh and shared.uncountable in sizes:
            victim = shared.uncountable
        elif own > sandbox.limit or (fresh and sandbox.used > sandbox.limit):
            held = {pid: size + sum(shared.processes.get(pid, {}).values()) for pid, size in sizes.items()}
            victim = max(held, key=held.__getitem__, default=0)
        else:
            wanted = wanted or sandbox.used > sandbox.limit
            victim = 0
        if victim and _kill(victim):
            sandbox.kills += 1
            sandbox.victim, sandbox.patience = victim, _PATIENCE
            wanted = True
    return wanted


def _lives(proc: str, pid: int) -> bool:
    """Whether a process exists and is not a zombie, which has no memory."""
    state = stat_fields(f"{proc}/{pid}")[:1]
    return bool(state) and state[0] not in {b"Z", b"X"}


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def machine_shared(proc: str = "/proc") -> int:
    """Return the bytes of shared memory on the whole machine: a cheap hint whether counting is worthwhile."""
    fields = read_if_there(f"{proc}/meminfo").partition(b"\nShmem:")[2].split(None, 1)
    return int(fields[0]) * 1024 if fields else 0


def shared_memory_device() -> int:
    """Return the device number of the kernel's memory file system, which has memfds and shared anonymous maps."""
    descriptor = os.memfd_create("device", os.MFD_CLOEXEC)
    try:
        return os.fstat(descriptor).st_dev
    finally:
        os.close(descriptor)


def count(first: int, device: int, before: Mapping[int, int], proc: str = "/proc") -> Shared:
    """Count the shared memory that the processes below `first` have mapped or open, each file once.

    For an open file the kernel reports its memory. For a file that is only mapped it reports the maps, so it counts as
    large as they reach, and never smaller than in `before`, the last count. Linear in descriptors and maps, of which at
    most `MOST_ENTRIES` are read.
    """
    processes: dict[int, dict[int, int]] = {}
    entries: dict[int, int] = {}
    room = MOST_ENTRIES
    for pid in below(first, children_by_parent(proc)):
        opened, seen_open = _open_shared(f"{proc}/{pid}", pid, device, room)
        mapped, seen_maps = _mapped_shared(f"{proc}/{pid}", device, room)
        for inode, reach in mapped.items():
            opened.setdefault(inode, max(reach, before.get(inode, 0)))
        if opened:
            processes[pid] = opened
        entries[pid] = seen_open + seen_maps
        room -= entries[pid]
        if room < 0:
            break
    crowded = max((pid for pid in entries if pid != first), key=entries.__getitem__, default=0)
    return Shared(processes, crowded if room < 0 else 0)


def count_all(watched: Sequence[WatchedSandbox]) -> bytes:
    """Count for several sandboxes. The result is for `parse_counted`."""
    device = shared_memory_device()
    found = {each.pid: count(each.pid, device, each.shared.files(each.shared.processes)) for each in watched}
    return json.dumps({pid: (shared.processes, shared.uncountable) for pid, shared in found.items()}).encode()


def parse_counted(text: bytes) -> dict[int, Shared]:
    """Return the counts by first process; none when the counting process was killed."""
    try:
        counts = json.loads(text)
    except ValueError:
        return {}
    return {int(pid): Shared(_numbered(processes), uncountable) for pid, (processes, uncountable) in counts.items()}


def _numbered(processes: Mapping[str, Mapping[str, int]]) -> dict[int, dict[int, int]]:
    return {int(pid): {int(inode): size for inode, size in files.items()} for pid, files in processes.items()}


def _open_shared(process: str, pid: int, device: int, room: int) -> tuple[dict[int, int], int]:
    """Return the bytes of open files on `device` by inode, and how many descriptors were read."""
    found: dict[int, int] = {}
    seen = 0
    for thread in _threads(process):
        number = int(thread.rpartition("/")[2])
        if number != pid and linux.share_descriptors(pid, number):
            continue
        try:
            with os.scandir(f"{thread}/fd") as entries:
                for entry in entries:
                    seen += 1
                    if seen > room:
                        return found, seen
                    try:
                        file = entry.stat()
                    except OSError:
                        continue
                    if file.st_dev == device:
                        found[file.st_ino] = file.st_blocks * 512
        except OSError:
            continue
    return found, seen


def _mapped_shared(process: str, device: int, room: int) -> tuple[dict[int, int], int]:
    """Return how far files on `device` are mapped, by inode, and how many maps were read."""
    wanted = f"{os.major(device):02x}:{os.minor(device):02x}".encode()
    found: dict[int, int] = {}
    seen = 0
    for place in (process, *_threads(process)):  # if the first thread has ended, another one shows the maps
        try:
            with open(f"{place}/maps", "rb") as file:
                for line in file:
                    seen += 1
                    if seen > room:
                        return found, seen
                    fields = line.split(None, 5)
                    # System V segments are counted from their list, whether they are mapped or not.
                    if len(fields) == 6 and fields[3] == wanted and not fields[5].startswith(b"/SYSV"):
                        start, _, end = fields[0].partition(b"-")
                        reach = int(fields[2], 16) + int(end, 16) - int(start, 16)
                        inode = int(fields[4])
                        found[inode] = max(reach, found.get(inode, 0))
        except OSError:
            continue
        if seen:
            break
    return found, seen


def _mounted(mounts: Sequence[int]) -> int:
    used = 0
    for descriptor in mounts:
        found = os.fstatvfs(descriptor)
        used += (found.f_blocks - found.f_bfree) * found.f_frsize
    return used


def _segments(descriptor: int) -> int:
    """Return the bytes of all System V segments in memory and in swap: the last two columns of the list."""
    if descriptor < 0:
        return 0
    os.lseek(descriptor, 0, os.SEEK_SET)
    table = b""
    while chunk := os.read(descriptor, 65536):
        table += chunk
    return sum(sum(map(int, line.split()[-2:])) for line in table.splitlines()[1:])


def _sockets(proc: str, pid: int) -> int:
    """Return the number of sockets in a process's network namespace, including closed ones that still hold data."""
    fields = read_if_there(f"{proc}/{pid}/net/sockstat").split(None, 3)
    return int(fields[2]) if len(fields) > 2 else 0


def _open_files(proc: str, pid: int) -> int:
    directory = f"{proc}/{pid}/fd"
    try:
        return os.stat(directory).st_size or len(os.listdir(directory))  # older kernels do not report the number
    except OSError:
        return 0


def deleted_open_bytes(pid: int, device: int, proc: str = "/proc") -> int:
    """Return the bytes of deleted files on `device` that processes below `pid` still have open or mapped."""
    found: dict[int, int] = {}
    for current in below(pid, children_by_parent(proc)):
        threads = _threads(f"{proc}/{current}")
        for thread in threads:  # a thread may have its own descriptors; memory is common to all
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
    """Return False when a thread shows no memory, because it has ended."""
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


def children_by_parent(proc: str = "/proc") -> dict[int, list[int]]:
    return _scan(proc)[0]


def _scan(proc: str) -> tuple[dict[int, list[int]], dict[int, int]]:
    """Return the children of each process, and the processor time that each and its ended children used, in ticks."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for name in os.listdir(proc):
        if name.isdigit():
            fields = stat_fields(f"{proc}/{name}")
            if len(fields) > 1:
                children.setdefault(int(fields[1]), []).append(int(name))
                ticks[int(name)] = sum(map(int, fields[11:15]))
    return children, ticks


def below(first: int, children: Mapping[int, Sequence[int]]) -> list[int]:
    """Return a process and all below it, parents first."""
    found = [first]
    for pid in found:  # grows meanwhile
        found += children.get(pid, ())
    return found


def _private_bytes(proc: str, pid: int) -> int:
    own = private_bytes(f"{proc}/{pid}")
    # If the first thread has ended before the others, the process itself seems to have no memory.
    return own or max(map(private_bytes, _threads(f"{proc}/{pid}")), default=0)


def _threads(process: str) -> list[str]:
    try:
        return [f"{process}/task/{name}" for name in os.listdir(f"{process}/task")]
    except OSError:
        return []
