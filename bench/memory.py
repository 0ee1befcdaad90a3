"""Memory of an idle sandbox, with two hundred alive: the proportional set size of its processes.

The kernel's own memory per sandbox (about half a megabyte: network namespace, cgroup) is not included, neither for
carrel nor for the peers; the count of the cgroup is shown too.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections import defaultdict

from bench import ground, peers
from bench.measure import BenchFailed, Figures, Progress, Report, Table

ALIVE = 200
BATCH = 50
PEERS_ALIVE = 50
MIB = 1024.0


async def run(progress: Progress) -> Report:
    """Measure."""
    peers.require()
    async with ground.sandboxes() as boxes:
        handles = []
        for first in range(0, ALIVE, BATCH):
            batch = await asyncio.gather(*(boxes.start() for _ in range(BATCH)))
            for handle in batch:
                await ground.first_command(handle)
            handles += batch
            progress(first + BATCH, ALIVE)
        pids = [int(handle["pid"] or 0) for handle in handles]
        families = descendants()
        ours = sum(pss_kib(pid) for first in pids for pid in [first, *families(first)]) / ALIVE / MIB
        first_only = sum(map(pss_kib, pids)) / ALIVE / MIB
        processes = sum(1 + len(families(pid)) for pid in pids) / ALIVE
        zygote = pss_kib(parent(pids[0])) / MIB
        counted = await ground.memory_of(boxes.provider, handles)
    cgroup = sum(counted) / ALIVE / MIB / MIB
    theirs = _bwrap_idle()
    table = Table("memory of an idle sandbox", ("", "alive", "PSS MB each", "processes each", "cgroup MB"))
    table.add("bubblewrap with `sleep`", str(PEERS_ALIVE), theirs, None, None)
    table.add("carrel, one command run", str(ALIVE), ours, processes, cgroup)
    table.add("  of which the supervisor", str(ALIVE), first_only, None, None)
    table.add("the zygote, once", "1", zygote, None, None)
    figures: Figures = {
        "idle_pss_mb": ours,
        "idle_supervisor_pss_mb": first_only,
        "idle_cgroup_mb": cgroup,
        "idle_bwrap_pss_mb": theirs,
        "zygote_pss_mb": zygote,
    }
    return Report(figures, [table])


def pss_kib(pid: int) -> int:
    """Return the proportional set size of a process."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            for line in file:
                if line.startswith("Pss:"):
                    return int(line.split()[1])
    except PermissionError:
        raise BenchFailed("the memory of sandboxes can only be read by root here") from None
    except (FileNotFoundError, ProcessLookupError):
        raise BenchFailed(f"process {pid} is gone, it should be idle") from None
    raise BenchFailed(f"the kernel does not tell the proportional memory of process {pid}")


def parent(pid: int) -> int:
    """Return the parent of a process."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return int(file.read().rpartition(")")[2].split()[1])


class descendants:  # noqa: N801 - used like a function: reads the process tree once, then answers many calls
    """The process tree at one moment."""

    def __init__(self) -> None:
        self._children: dict[int, list[int]] = defaultdict(list)
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    self._children[parent(int(name))].append(int(name))
                except (FileNotFoundError, ProcessLookupError):
                    continue

    def __call__(self, pid: int) -> list[int]:
        """Return every process below `pid`."""
        below = []
        for child in self._children.get(pid, ()):
            below += [child, *self(child)]
        return below


def _bwrap_idle() -> float:
    """Return the MB of an idle bubblewrap, with its first process and the program in it."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(PEERS_ALIVE):
            command = [*peers.BWRAP, "sh", "-c", "echo ready; exec sleep 600"]
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        for process in running:
            assert process.stdout is not None
            process.stdout.readline()
        families = descendants()
        pids = [pid for process in running for pid in [process.pid, *families(process.pid)]]
        return sum(map(pss_kib, pids)) / PEERS_ALIVE / MIB
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
