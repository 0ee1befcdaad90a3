"""What no cgroup and no quota holds: looks at a sandbox's processes from outside, and kills as the kernel would.

Memory, where no cgroup can be had; and disk space of files that were deleted but are still held.

The kernel holds each single process to the limit (`RLIMIT_DATA`); `look` adds up the private memory of all, the memory
file systems, System V segments and the other shared memory that `count` found. It is coarser than a cgroup: a burst
between two looks is seen late, and memory of the kernel's own is not seen. `carrel doctor` says which of the two a host
has. Sockets are held by their number: the buffers of one are small, because the system call filter lets no program
enlarge them.
"""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from carrel.isolation import linux
from carrel.primitives.kernel_files import read_if_there

INTERVAL_S = 0.1
COUNT_INTERVAL_S = 5.0
"""Shared memory is counted at least so often, and whenever that of the whole machine has changed by `COUNT_STEP`."""
COUNT_STEP = 1024 * 1024
MOST_ENTRIES = 65_536
"""Descriptors and maps that are looked at in one sandbox. Who has more is treated as over its limit."""
SOCKET_BYTES = 2 * 212_992
FEWEST_SOCKETS = 256
_PATIENCE = 10
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Shared:
    """Shared memory of a sandbox: by process, then by inode, the bytes of each file of it that is mapped or held open.

    `uncountable` is the process with the most descriptors and maps where there were too many to look at, else 0.
    """

    processes: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    uncountable: int = 0

    def files(self, alive: Collection[int]) -> dict[int, int]:
        """The files that processes hold of those that are still there: each once, by inode with its bytes."""
        found: dict[int, int] = {}
        for pid in alive:
            for inode, size in self.processes.get(pid, {}).items():
                found[inode] = max(size, found.get(inode, 0))
        return found


@dataclass
class Watched:
    """A sandbox whose memory is watched: its first process, its limit, and how often it was over it.

    `mounts` are descriptors of its memory file systems, `segments` one of the kernel's list of its System V segments.
    Without `own_network` its sockets cannot be told from the host's.
    """

    pid: int
    limit: int
    kills: int = 0
    used: int = 0
    own_network: bool = False
    segments: int = -1
    mounts: Sequence[int] = ()
    shared: Shared = Shared()
    fresh: bool = False
    victim: int = 0
    patience: int = 0

    def take_count(self, shared: Shared, kills: int) -> None:
        """Take what was counted when there had been that many `kills`; it is old when there was one since."""
        self.shared = shared
        self.fresh = kills == self.kills

    def let_go(self) -> None:
        """Close the descriptors."""
        for descriptor in (self.segments, *self.mounts):
            if descriptor >= 0:
                os.close(descriptor)
        self.segments, self.mounts = -1, ()


def look(watched: Sequence[Watched], proc: str = "/proc") -> bool:
    """Add up each sandbox's memory; where it is over the limit, kill its largest process but the first.

    What was counted of shared memory may be freed by now, so nobody is killed for it but in the look that follows the
    count. Tells whether a new count is wanted.
    """
    wanted = False
    children = _children(proc)
    for sandbox in watched:
        sizes = {pid: _private_bytes(proc, pid) for pid in _below(sandbox.pid, children)}
        sizes = {pid: size for pid, size in sizes.items() if size}  # what has ended holds nothing
        shared = sandbox.shared
        own = sum(sizes.values()) + _mounted(sandbox.mounts) + _segments(sandbox.segments)
        sandbox.used = own + sum(shared.files(sizes).values())
        fresh, sandbox.fresh = sandbox.fresh, False
        sizes.pop(sandbox.pid, None)
        if sandbox.patience and _lives(proc, sandbox.victim):  # it frees what it had; nobody else must die for that
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
    """Whether a process is there and no zombie: a zombie has given back all it had."""
    state = read_if_there(f"{proc}/{pid}/stat").rpartition(b")")[2].split(None, 1)[:1]
    return bool(state) and state[0] not in {b"Z", b"X"}


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def machine_shared(proc: str = "/proc") -> int:
    """Bytes of shared memory on the whole machine: one read that tells whether counting is worth its while."""
    told = read_if_there(f"{proc}/meminfo").partition(b"\nShmem:")[2].split(None, 1)
    return int(told[0]) * 1024 if told else 0


def shared_memory_device() -> int:
    """The device number of the kernel's own memory file system: memfds and shared anonymous maps are files of it."""
    descriptor = os.memfd_create("device", os.MFD_CLOEXEC)
    try:
        return os.fstat(descriptor).st_dev
    finally:
        os.close(descriptor)


def count(first: int, device: int, before: Mapping[int, int], proc: str = "/proc") -> Shared:
    """Count the shared memory that the processes below `first` map or hold open, each file of it once.

    An open file tells how much memory it has. Of one that is only mapped the kernel tells the maps alone: it counts as
    large as it reaches in them, and never as smaller than `before`, the files of the last count. Linear in
    descriptors and maps, at most `MOST_ENTRIES` of them.
    """
    processes: dict[int, dict[int, int]] = {}
    entries: dict[int, int] = {}
    room = MOST_ENTRIES
    for pid in _below(first, _children(proc)):
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


def counted(watched: Sequence[Watched]) -> bytes:
    """Count for several sandboxes; read by `parse_counted`."""
    device = shared_memory_device()
    found = {each.pid: count(each.pid, device, each.shared.files(each.shared.processes)) for each in watched}
    return json.dumps({pid: (shared.processes, shared.uncountable) for pid, shared in found.items()}).encode()


def parse_counted(text: bytes) -> dict[int, Shared]:
    """The counted bytes of each sandbox, by its first process; empty when the counting process was ended early."""
    try:
        told = json.loads(text)
    except ValueError:
        return {}
    return {int(pid): Shared(_numbered(processes), uncountable) for pid, (processes, uncountable) in told.items()}


def _numbered(processes: Mapping[str, Mapping[str, int]]) -> dict[int, dict[int, int]]:
    return {int(pid): {int(inode): size for inode, size in files.items()} for pid, files in processes.items()}


def _open_shared(process: str, pid: int, device: int, room: int) -> tuple[dict[int, int], int]:
    """Open files on `device` by inode with their bytes, and how many descriptors were looked at."""
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
    """Mapped files on `device` by inode with the bytes that they reach to, and how many maps were looked at."""
    wanted = f"{os.major(device):02x}:{os.minor(device):02x}".encode()
    found: dict[int, int] = {}
    seen = 0
    for place in (process, *_threads(process)):  # where its first thread has ended, another has the memory
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
    """Bytes in memory and in swap of all System V segments: the last two columns of the list."""
    if descriptor < 0:
        return 0
    os.lseek(descriptor, 0, os.SEEK_SET)
    told = b""
    while chunk := os.read(descriptor, 65536):
        told += chunk
    return sum(sum(map(int, line.split()[-2:])) for line in told.splitlines()[1:])


def _sockets(proc: str, pid: int) -> int:
    """How many sockets there are in a process's network, those included that are closed but still hold data."""
    told = read_if_there(f"{proc}/{pid}/net/sockstat").split(None, 3)
    return int(told[2]) if len(told) > 2 else 0


def _open_files(proc: str, pid: int) -> int:
    directory = f"{proc}/{pid}/fd"
    try:
        return os.stat(directory).st_size or len(os.listdir(directory))  # older kernels do not tell the number
    except OSError:
        return 0


def held(pid: int, device: int, proc: str = "/proc") -> int:
    """Bytes of files on `device` that have no name any more but are held open or mapped by processes below `pid`."""
    found: dict[int, int] = {}
    for current in _below(pid, _children(proc)):
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


def _children(proc: str) -> dict[int, list[int]]:
    """The children of every process of the machine."""
    found: dict[int, list[int]] = {}
    for name in os.listdir(proc):
        if name.isdigit():
            fields = read_if_there(f"{proc}/{name}/stat").rpartition(b")")[2].split()
            if len(fields) > 1:
                found.setdefault(int(fields[1]), []).append(int(name))
    return found


def _below(first: int, children: Mapping[int, Sequence[int]]) -> list[int]:
    """A process and all below it."""
    found = [first]
    for pid in found:  # grows meanwhile
        found += children.get(pid, ())
    return found


def _private_bytes(proc: str, pid: int) -> int:
    own = _private(f"{proc}/{pid}")
    # Its first thread may have ended before the others: what is told of the process is then that it has nothing.
    return own or max(map(_private, _threads(f"{proc}/{pid}")), default=0)


def _private(place: str) -> int:
    fields = read_if_there(f"{place}/statm").split()
    return max(0, int(fields[1]) - int(fields[2])) * _PAGE if len(fields) > 2 else 0


def _threads(process: str) -> list[str]:
    try:
        return [f"{process}/task/{name}" for name in os.listdir(f"{process}/task")]
    except OSError:
        return []
