"""Volumes, which hold the files of workspaces, and their snapshots."""

from __future__ import annotations

import logging
import os
from typing import Literal

from carrel.errors import CarrelError, Unsupported
from carrel.workspaces.volumes.base import Change, ChangeKind, Collected, SnapshotFacts, VolumeDriver
from carrel.workspaces.volumes.btrfs import POOL_BYTES, POOL_MAX_BYTES, BtrfsDriver
from carrel.workspaces.volumes.directory import DirectoryDriver

__all__ = [
    "BtrfsDriver",
    "Change",
    "ChangeKind",
    "Collected",
    "DirectoryDriver",
    "SnapshotFacts",
    "VolumeDriver",
    "open_driver",
]

log = logging.getLogger("carrel.volumes")


def open_driver(
    root: str,
    wanted: Literal["auto", "directory", "btrfs"],
    *,
    pool_bytes: int = POOL_BYTES,
    pool_max_bytes: int = POOL_MAX_BYTES,
    first: bool = True,
    last: bool = True,
) -> VolumeDriver:
    """Open the wanted driver. `first`: no other process uses the volumes yet; `last`: none does after `close`.

    `auto` keeps the driver that was used before, and else prefers btrfs where it works. The
    sizes, first and largest, are for a pool of btrfs.
    """
    used_directories = os.path.isdir(os.path.join(root, "packs"))
    if wanted == "directory" or (wanted == "auto" and used_directories):
        return _opened(DirectoryDriver(root))
    btrfs = BtrfsDriver(root, pool_bytes=pool_bytes, pool_max_bytes=pool_max_bytes, first=first, last=last)
    needed = wanted == "btrfs" or os.path.exists(os.path.join(root, "pool.btrfs"))
    missing = btrfs.missing()
    if missing is not None:
        if needed:
            raise Unsupported(missing, field="volumes", hint="run as root with btrfs-progs installed")
        return _opened(DirectoryDriver(root))
    try:
        return _opened(btrfs)
    except CarrelError as error:
        if needed:
            raise
        log.warning("btrfs volumes do not work here, so workspaces are plain directories: %s", error)
        return _opened(DirectoryDriver(root))


def _opened(driver: VolumeDriver) -> VolumeDriver:
    driver.open()
    return driver
