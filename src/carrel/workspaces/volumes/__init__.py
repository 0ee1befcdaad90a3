"""Where workspaces keep their files: volumes, and the snapshots taken of them."""

from carrel.workspaces.volumes.base import (
    Change,
    ChangeKind,
    Collected,
    SnapshotFacts,
    VolumeDriver,
    VolumeUsage,
    transfer,
)
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
    "VolumeUsage",
    "transfer",
]
