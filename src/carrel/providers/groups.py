"""The cgroups of sandboxes that are programs of their own on the host: limits, their processes, and their end.

A sandbox has several processes on the host, and all of them are in its group from the first moment. So the group, found
by the id of the sandbox, is how a restarted server finds and ends whatever there is of it. Blocking, but short.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress

from carrel.errors import PlatformError
from carrel.isolation import cgroups
from carrel.isolation.cgroups import Cgroups
from carrel.primitives.kernel_files import read_if_there
from carrel.providers.base import ResourceUse

_DEADLINE_S = 30.0


class SandboxGroups:
    """Makes the groups of this server, and finds those of every server of this host."""

    def __init__(self) -> None:
        self._own: Cgroups | None = None
        self._opening = threading.Lock()

    def make(self, id: str, memory_mb: int | None, cpus: float | None = None) -> list[str]:
        """Make the groups of a sandbox; return the files by which its first process enters them. `memory_mb` includes
        what the program itself uses.

        Raises `PlatformError`.
        """
        with self._opening:  # sandboxes are started side by side, each in a thread
            if self._own is None:
                self._own = Cgroups.open()
        if "memory" not in self._own.controllers:
            raise PlatformError("no cgroup for memory can be made", hint="run `carrel doctor`")
        self._own.make(id).close()
        self._own.limit(id, memory_mb, cpus)
        return [f"{group}/{'cgroup.procs' if version == 2 else 'tasks'}" for group, version in find(id)]

    def limit_cpus(self, id: str, cpus: float) -> None:
        """Limit the processors of a sandbox whose groups this object has made. Raises `PlatformError`."""
        if self._own is None:
            raise PlatformError(f"sandbox {id} has no group of this server")
        self._own.limit(id, None, cpus)

    def end(self, id: str) -> None:
        """Kill every process of a sandbox and remove its groups. Raises `PlatformError` if that takes too long."""
        deadline = time.monotonic() + _DEADLINE_S
        pause = 0.001
        while groups := list(find(id)):
            for group, _ in groups:
                for pid in processes(group):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                with suppress(OSError):  # a dying process holds it for a moment
                    os.rmdir(group)
            if time.monotonic() > deadline:
                raise PlatformError(f"sandbox {id} could not be ended")
            time.sleep(pause)
            pause = min(0.05, pause * 2)
        cgroups.sweep()

    def close(self) -> None:
        if self._own is not None:
            self._own.close()
            self._own = None


def find(id: str) -> Iterator[tuple[str, int]]:
    """Return the directories of a sandbox's groups with their version, whichever server made them."""
    for hierarchy in cgroups.of_this_process():
        with suppress(OSError):
            for name in os.listdir(hierarchy.path):
                path = f"{hierarchy.path}/{name}/{id}"
                if name.startswith("carrel-") and os.path.isdir(path):
                    yield path, hierarchy.version


def processes(group: str) -> list[int]:
    """Return the processes in a group."""
    return [int(line) for line in read_if_there(f"{group}/cgroup.procs", 1 << 20).split()]


def usage(id: str) -> dict[str, int]:
    """Return what a sandbox uses, as `cgroups.group_usage` does."""
    found: dict[str, int] = {}
    for group, version in find(id):
        found |= cgroups.group_usage(version, group)
    return found


def resources(ids: Iterable[str]) -> dict[str, ResourceUse]:
    """Return what sandboxes use, by id, without those of which nothing is known."""
    found = {id: usage(id) for id in ids}
    return {id: ResourceUse.counted(used) for id, used in found.items() if used}
