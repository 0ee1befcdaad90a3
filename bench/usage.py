"""The cost of measuring the size of every workspace, as the server does every 30 seconds for 200 of them.

Measured in processor time, including the kernel's, as a share of one core. Walking is linear in the number of files: a
quarter of the workspaces is built, and each is walked four times.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from bench import ground
from bench.measure import Figures, Progress, Report, Table, median
from carrel.workspaces.volumes import BtrfsDriver, DirectoryDriver, VolumeDriver

WORKSPACES = 200
FILES = 300
EVERY_S = 30
ROUNDS = 5
_BUILT = WORKSPACES // 4


async def run(progress: Progress) -> Report:
    """Measure."""
    async with ground.scratch() as place:
        return await asyncio.to_thread(_run, place, progress)


def _run(place: Path, progress: Progress) -> Report:
    table = Table(f"usage of {WORKSPACES} workspaces every {EVERY_S} s", ("", "ms a round", "% of a core"))
    drivers: list[tuple[VolumeDriver, int, int]] = [(DirectoryDriver(str(place / "plain")), _BUILT, FILES)]
    btrfs = BtrfsDriver(str(place / "pool"), pool_bytes=1 << 30)
    if btrfs.missing() is None:
        drivers.append((btrfs, WORKSPACES, 3))  # the kernel counts, so their content does not matter
    found: dict[str, float] = {}
    for number, (driver, volumes, files) in enumerate(drivers):
        driver.open()
        try:
            seconds = _round(driver, volumes, files)
        finally:
            driver.close()
        found[driver.name] = seconds / EVERY_S * 100
        table.add(f"{driver.name} driver", seconds * 1000, found[driver.name])
        progress(number + 1, len(drivers))
    default = drivers[-1][0].name
    figures: Figures = {"usage_scan_core_percent": found[default]}
    figures |= {f"usage_scan_core_percent_{name}": share for name, share in found.items() if name != default}
    return Report(figures, [table])


def _round(driver: VolumeDriver, volumes: int, files: int) -> float:
    """Return the processor seconds to read the usage of all workspaces once."""
    for volume in range(volumes):
        driver.create(f"v{volume}", 1 << 30)
        for number in range(files):
            folder = f"{driver.path(f'v{volume}')}/{number // 30}"
            if number % 30 == 0:
                os.mkdir(folder)
            with open(f"{folder}/{number}", "wb") as file:
                file.write(b"x" * (number * 37 % 6000))
    os.sync()
    samples = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for turn in range(WORKSPACES):
            driver.usage(f"v{turn % volumes}")
        samples.append(time.process_time() - began)
    return median(samples)
