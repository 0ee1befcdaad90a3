"""Memory and CPU limits by cgroup, and what they count: version 2, version 1 where that is what the host has, or none.

A `Cgroups` owns one directory per hierarchy, named after the process that created it, with one group per sandbox below.
It keeps directory descriptors, so it works after its owner has left the host's file system. It creates and removes
only its own groups.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from carrel.errors import PlatformError
from carrel.primitives.kernel_files import read, write

_OWN = re.compile(r"^carrel-(\d+)-(\d+)(?:-\d+)?$")
_ESCAPED = re.compile(r"\\([0-7]{3})")  # how mountinfo writes white space and backslashes
PERIOD_US = 100_000
_CONTROLLERS = ("memory", "cpu", "cpuacct")
"""Those of version 1 that we need; `cpuacct` counts and limits nothing."""
_MEMORY_FILES = {
    1: {"memory_bytes": "memory.usage_in_bytes", "memory_peak_bytes": "memory.max_usage_in_bytes"},
    2: {"memory_bytes": "memory.current", "memory_peak_bytes": "memory.peak"},
}


@dataclass(frozen=True)
class Hierarchy:
    """One mounted cgroup hierarchy: its path, its version, and which of our controllers it has."""

    path: str
    version: int
    controllers: tuple[str, ...]


@dataclass(frozen=True)
class GroupEntry:
    """The descriptors with which the first process of a sandbox enters its groups.

    Moving another process makes the kernel wait for a grace period of many milliseconds. There is no such wait for a
    child that is forked into its group (version 2), or a single thread that moves itself by a `tasks` file (version 1).
    """

    tasks: tuple[int, ...] = ()
    into: int = -1

    def enter(self) -> None:
        """Enter the groups of version 1. Called by the child itself, first of all."""
        for descriptor in self.tasks:
            os.write(descriptor, b"0")

    def close(self) -> None:
        for descriptor in (*self.tasks, self.into):
            if descriptor >= 0:
                os.close(descriptor)


def settings(version: int, controller: str, memory_mb: int | None, cpus: float | None) -> dict[str, str]:
    """Return the files to write, in order, for the limits of one controller."""
    if controller == "memory" and memory_mb is not None:
        limit = str(memory_mb * 1024 * 1024)
        if version == 2:
            return {"memory.max": limit, "memory.swap.max": "0", "memory.oom.group": "0"}
        return {"memory.limit_in_bytes": limit, "memory.memsw.limit_in_bytes": limit}
    if controller == "cpu" and cpus is not None and cpus < (os.cpu_count() or 1):
        quota = max(1000, int(cpus * PERIOD_US))
        if version == 2:
            return {"cpu.max": f"{quota} {PERIOD_US}"}
        return {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": str(quota)}
    return {}


_OPTIONAL = frozenset({"memory.memsw.limit_in_bytes", "memory.swap.max", "memory.oom.group"})


def hierarchies(mountinfo: str, own: str) -> list[Hierarchy]:
    """Return the hierarchies with a controller that we need, from `/proc/self/mountinfo` and `/proc/self/cgroup`."""
    own_v2 = next((line[3:] for line in own.splitlines() if line.startswith("0::")), "/")
    found = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(" "), right.split(" ")
        if len(fields) < 5 or len(kind) < 3:
            continue
        point = _ESCAPED.sub(lambda octal: chr(int(octal[1], 8)), fields[4])
        if kind[0] == "cgroup2":
            found.append(Hierarchy(_nearest_writable(point, own_v2), 2, ("memory", "cpu")))
        elif kind[0] == "cgroup":
            controllers = tuple(name for name in _CONTROLLERS if name in kind[2].split(","))
            if controllers:
                found.append(Hierarchy(point, 1, controllers))
    return found


def of_this_process() -> list[Hierarchy]:
    """Return the hierarchies that this process sees."""
    with open("/proc/self/mountinfo", encoding="utf-8") as mounts, open("/proc/self/cgroup", encoding="utf-8") as own:
        return hierarchies(mounts.read(), own.read())


def _nearest_writable(point: str, own: str) -> str:
    """Return the top of a version 2 tree for root; for other users the highest writable ancestor of their group."""
    if os.geteuid() == 0:
        return point
    best = path = (point + own).rstrip("/") or point
    while len(path) >= len(point) and os.access(path, os.W_OK) and os.access(f"{path}/cgroup.procs", os.W_OK):
        best, path = path, os.path.dirname(path)
    return best


def host_memory_mb() -> int:
    """Return the memory that all sandboxes together can have: that of the host, or of the container that this server
    runs in.
    """
    with open("/proc/meminfo", encoding="utf-8") as file:
        total = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemTotal:"))
    return min([total, *memory_limits(of_this_process())]) // (1024 * 1024)


def memory_limits(found: Iterable[Hierarchy]) -> list[int]:
    """Return the limits, in bytes, of groups that are created in these hierarchies."""
    limits = []
    for hierarchy in found:
        path, name = hierarchy.path, "memory.max" if hierarchy.version == 2 else "memory.limit_in_bytes"
        while "memory" in hierarchy.controllers and os.path.exists(f"{path}/cgroup.procs"):
            # The root group has no such file, and `max` means no limit.
            with suppress(OSError, ValueError), open(f"{path}/{name}", encoding="ascii") as file:
                limits.append(int(file.read()))
            path = os.path.dirname(path)
    return limits


class Cgroups:
    """The groups of one zygote."""

    def __init__(self) -> None:
        self._directories: dict[str, tuple[int, int]] = {}
        self._parents: list[tuple[int, str]] = []
        self.reason: str | None = None

    @property
    def controllers(self) -> frozenset[str]:
        """The usable controllers: `memory`, `cpu`, and with version 1 `cpuacct`."""
        return frozenset(self._directories)

    @property
    def version(self) -> str:
        """`v2`, `v1` or `none`, for people."""
        versions = {version for version, _ in self._directories.values()}
        return f"v{max(versions)}" if versions else "none"

    @classmethod
    def open(cls) -> Cgroups:
        """Create our own directories where the host has controllers. Never raises for a controller that is missing."""
        groups = cls()
        name = f"carrel-{os.getpid()}-{start_time(os.getpid())}"
        reasons = []
        for hierarchy in sorted(of_this_process(), key=lambda found: found.version):
            try:
                groups._adopt(hierarchy, name)
            except OSError as error:
                reasons.append(f"{hierarchy.path}: {error.strerror}")
        groups.reason = "; ".join(reasons) or None
        return groups

    def _adopt(self, hierarchy: Hierarchy, name: str) -> None:
        _sweep(hierarchy.path)
        if hierarchy.version == 2:
            with open(f"{hierarchy.path}/cgroup.controllers", encoding="utf-8") as file:
                present = set(file.read().split())
            wanted = [controller for controller in hierarchy.controllers if controller in present]
            if not wanted:
                return
            write(f"{hierarchy.path}/cgroup.subtree_control", " ".join(f"+{c}" for c in wanted))
        else:
            wanted = [c for c in hierarchy.controllers if c not in self._directories]
        if wanted:
            path = _make_new(f"{hierarchy.path}/{name}")
            name = os.path.basename(path)
            if hierarchy.version == 2:
                write(f"{path}/cgroup.subtree_control", " ".join(f"+{c}" for c in wanted))
            self._parents.append((os.open(hierarchy.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), name))
            directory = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            for controller in wanted:
                self._directories[controller] = (hierarchy.version, directory)

    def make(self, group: str) -> GroupEntry:
        """Create the groups of a sandbox, without limits yet. Raises `PlatformError` and then leaves none."""
        tasks: list[int] = []
        into = -1
        done: set[int] = set()
        try:
            for version, directory in self._directories.values():
                if directory in done:  # one version 2 group serves both controllers
                    continue
                done.add(directory)
                os.mkdir(group, 0o755, dir_fd=directory)
                if version == 1:
                    tasks.append(os.open(f"{group}/tasks", os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory))
                else:
                    into = os.open(group, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
        except OSError as error:
            GroupEntry(tuple(tasks), into).close()
            self.remove(group)
            raise PlatformError(f"cgroup {group} could not be made: {error}") from error
        return GroupEntry(tuple(tasks), into)

    def limit(self, group: str, memory_mb: int | None, cpus: float | None) -> None:
        """Set the limits of a group. Raises `PlatformError`."""
        for controller, (version, directory) in self._directories.items():
            for name, value in settings(version, controller, memory_mb, cpus).items():
                try:
                    write(f"{group}/{name}", value, dir_fd=directory)
                except OSError as error:
                    if name not in _OPTIONAL:
                        raise PlatformError(f"{name} of cgroup {group} could not be set: {error}") from error

    def remove(self, group: str) -> bool:
        """Remove a sandbox's groups; False while a dying process still holds one."""
        gone = True
        for _, directory in self._directories.values():
            try:
                os.rmdir(group, dir_fd=directory)
            except FileNotFoundError:
                pass
            except OSError:
                gone = False
        return gone

    def usage(self, group: str) -> dict[str, int]:
        """Return what a sandbox uses, as `group_usage` does."""
        answer: dict[str, int] = {}
        for controller, (version, directory) in self._directories.items():
            if controller == "memory":
                answer |= _memory_usage(version, group, directory)
            elif controller == "cpuacct" or version == 2:
                answer |= _cpu_usage(version, group, directory)
        return answer

    def close(self) -> None:
        """Remove our own directories. Those with living groups stay until the next sweep."""
        for directory in {directory for _, directory in self._directories.values()}:
            os.close(directory)
        self._directories.clear()
        for parent, name in self._parents:
            try:
                os.rmdir(name, dir_fd=parent)
            except OSError:
                pass
            os.close(parent)
        self._parents.clear()


def usage_of(pid: int) -> dict[str, int]:
    """Return what the group that a process is in uses, as `group_usage` does."""
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return {}
    places = {name: place for _, names, place in lines for name in names.split(",")}  # version 2 has no name
    answer: dict[str, int] = {}
    for hierarchy in of_this_process():
        place = places.get(hierarchy.controllers[0] if hierarchy.version == 1 else "")
        if place is not None:
            answer |= group_usage(hierarchy.version, f"{hierarchy.path}{place}")
    return answer


def group_usage(version: int, group: str, dir_fd: int | None = None) -> dict[str, int]:
    """Return `memory_bytes`, `memory_peak_bytes`, `oom_kills` and `cpu_us` of a group in one hierarchy, as far as they
    are known there: older kernels of version 2 know no peak.
    """
    return _memory_usage(version, group, dir_fd) | _cpu_usage(version, group, dir_fd)


def _memory_usage(version: int, group: str, dir_fd: int | None) -> dict[str, int]:
    found = {key: _number(f"{group}/{name}", dir_fd) for key, name in _MEMORY_FILES[version].items()}
    events = "memory.events" if version == 2 else "memory.oom_control"
    found["oom_kills"] = _number(f"{group}/{events}", dir_fd, "oom_kill")
    return {key: value for key, value in found.items() if value is not None}


def _cpu_usage(version: int, group: str, dir_fd: int | None) -> dict[str, int]:
    if version == 2:
        used = _number(f"{group}/cpu.stat", dir_fd, "usage_usec")
    else:
        nanoseconds = _number(f"{group}/cpuacct.usage", dir_fd)
        used = None if nanoseconds is None else nanoseconds // 1000
    return {} if used is None else {"cpu_us": used}


def _number(path: str, dir_fd: int | None, entry: str = "") -> int | None:
    """Return the number in a file, or that of one of its lines; None if it is not there."""
    try:
        text = read(path, dir_fd=dir_fd).decode()
        if entry:
            text = next(line for line in text.splitlines() if line.startswith(f"{entry} ")).partition(" ")[2]
        return int(text)
    except (OSError, ValueError, StopIteration):
        return None


def start_time(pid: int, proc: str = "/proc") -> int:
    """Return when a process started, in clock ticks since boot, or 0 when it is gone. With the PID it is unique."""
    try:
        with open(f"{proc}/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return 0 if fields[0] == b"Z" else int(fields[19])
    except (OSError, IndexError, ValueError):
        return 0


def sweep() -> bool:
    """Remove the empty groups of zygotes that are gone. Returns False while a dying process still holds one."""
    done = True
    for hierarchy in of_this_process():
        try:
            done = _sweep(hierarchy.path) and done
        except OSError:
            continue
    return done


def _make_new(path: str) -> str:
    """Make a directory of this process. It may have others, of another provider or of sandboxes that are ending."""
    for number in itertools.count():
        wanted = f"{path}-{number}" if number else path
        with suppress(FileExistsError):
            os.mkdir(wanted, 0o755)
            return wanted
    raise AssertionError


def _sweep(path: str) -> bool:
    done = True
    for entry in _groups(path):
        match = _OWN.match(entry.name)
        if match is None or start_time(int(match[1])) == int(match[2]):
            continue
        for group in (*_groups(entry.path), entry):
            try:
                os.rmdir(group.path)
            except OSError:
                done = done and (bool(_groups(group.path)) or _has_processes(group.path))
    return done


def _groups(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:  # removed by another process
        return []


def _has_processes(path: str) -> bool:
    try:
        with open(f"{path}/cgroup.procs", "rb") as file:
            return bool(file.read(1))
    except OSError:
        return False
