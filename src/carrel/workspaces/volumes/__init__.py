"""Where workspaces keep their files: volumes, and the snapshots taken of them."""

from __future__ import annotations

import logging
import os
from typing import Literal

from carrel.errors import CarrelError, Unsupported
from carrel.workspaces.volumes.base import Change, ChangeKind, Collected, SnapshotFacts, VolumeDriver
from carrel.workspaces.volumes.btrfs import BtrfsDriver
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


def open_driver(root: str, wanted: Literal["auto", "directory", "btrfs"]) -> VolumeDriver:
    """The driver asked for, open. `auto` goes on with what is there, and else takes btrfs where it can be had."""
    if wanted == "directory" or (wanted == "auto" and _directories(root)):
        return _opened(DirectoryDriver(root))
    btrfs = BtrfsDriver(root)
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
        log.warning("btrfs volumes cannot be had here, so workspaces are plain directories: %s", error)
        return _opened(DirectoryDriver(root))


def _opened(driver: VolumeDriver) -> VolumeDriver:
    driver.open()
    return driver


def _directories(root: str) -> bool:
    """Whether the directory driver has been used here."""
    return os.path.isdir(os.path.join(root, "packs"))
