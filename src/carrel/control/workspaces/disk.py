"""Measures what uses the disk of a server, part by part. The number of counted entries is bounded."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime

from carrel.models import DiskPart, DiskUsage
from carrel.workspaces.layout import Layout
from carrel.workspaces.usage import scan
from carrel.workspaces.volumes import VolumeDriver

MOST_ENTRIES = 500_000
"""The largest number of files and directories that are counted, in all parts together."""
REUSED_S = 30.0
"""An answer is reused for this long at most before the disk is measured again."""
REUSED_TIMES = 20
"""An answer is reused for this many times as long as it took to measure: measuring takes at most a twentieth of the
time, and a server whose disk is measured quickly answers with what is there now.
"""


class Disk:
    """Measures the data directory of one server, and its archive where that is a directory."""

    def __init__(
        self,
        layout: Layout,
        driver: VolumeDriver,
        archive_url: str,
        *,
        most_entries: int = MOST_ENTRIES,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._layout = layout
        self._driver = driver
        self._archive = archive_url if archive_url.startswith("/") else None
        self._most = most_entries
        self._clock = clock
        self._measuring = asyncio.Lock()
        self._known: DiskUsage | None = None
        self._reused_until = 0.0

    async def usage(self) -> DiskUsage:
        """Return the current usage, or a recent one if measuring takes long."""
        async with self._measuring:
            if self._known is None or self._clock() > self._reused_until:
                began = self._clock()
                self._known = await asyncio.to_thread(self._measure)
                ended = self._clock()
                self._reused_until = ended + min(REUSED_S, REUSED_TIMES * (ended - began))
            return self._known

    def _measure(self) -> DiskUsage:
        layout = self._layout
        archive = [] if self._archive is None else [self._archive]
        environments, packages = os.path.join(layout.data_dir, "envs"), os.path.join(layout.cache, "packages")
        count = _Count(self._most)
        parts = self._from_kernel() if self._driver.kernel_quota else self._counted(count)
        parts += [
            count.part("archive", archive),
            count.part("environments", [environments]),
            count.part("packages", [packages]),
        ]
        records, others = _rest(layout.data_dir, {*archive, layout.storage, environments, packages})
        parts += [DiskPart(name="records", bytes=records), count.part("other", others)]
        facts = os.statvfs(layout.data_dir)
        return DiskUsage(
            parts=parts,
            capacity_bytes=facts.f_blocks * facts.f_frsize,
            free_bytes=facts.f_bavail * facts.f_frsize,
            measured_at=datetime.now(UTC),
        )

    def _counted(self, count: _Count) -> list[DiskPart]:
        volumes = self._driver.directory
        beside = [entry.path for entry in os.scandir(self._layout.storage) if entry.path != volumes]
        return [count.part("workspaces", [volumes]), count.part("snapshots", beside)]

    def _from_kernel(self) -> list[DiskPart]:
        """Read usage from the kernel. Snapshots share data with workspaces: they count as what is used beyond the
        workspaces.
        """
        held = sum(self._driver.usage(volume) for volume in self._driver.volumes())
        facts = os.statvfs(self._driver.directory)
        stored = (facts.f_blocks - facts.f_bfree) * facts.f_frsize
        return [DiskPart(name="workspaces", bytes=held), DiskPart(name="snapshots", bytes=max(0, stored - held))]


class _Count:
    """Counts parts one after the other, up to a total number of entries."""

    def __init__(self, most: int):
        self._left = most

    def part(self, name: str, paths: list[str]) -> DiskPart:
        """Return the usage of these directories."""
        total, complete = 0, True
        for path in filter(os.path.isdir, paths):
            found = scan(path, stop_entries=max(0, self._left))
            total += found.bytes
            complete = complete and found.complete
            self._left -= found.entries
        return DiskPart.model_validate({"name": name, "bytes": total, "complete": complete})


def _rest(data_dir: str, known: set[str]) -> tuple[int, list[str]]:
    """Return the bytes of the files in the data directory itself, which are its records; and the directories that are
    not known and contain no known one.
    """
    size, others = 0, []
    for entry in os.scandir(data_dir):
        if entry.is_file(follow_symlinks=False):
            size += entry.stat(follow_symlinks=False).st_blocks * 512
        elif not entry.is_dir(follow_symlinks=False) or entry.path in known:
            continue
        elif any(path.startswith(f"{entry.path}/") for path in known):
            others += _rest(entry.path, known)[1]
        else:
            others.append(entry.path)
    return size, others
