"""Checks and helpers for tests of volume drivers and of the archive."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time

from carrel.errors import SnapshotDamaged
from carrel.primitives import libc
from carrel.primitives.trees import remove_tree
from carrel.workspaces.archive import Archive
from carrel.workspaces.layout import CANONICAL_UID
from carrel.workspaces.remote import Remote
from carrel.workspaces.volumes import VolumeDriver
from carrel.workspaces.volumes.directory import opened
from carrel.workspaces.volumes.plain_trees import copy_tree


def unmount(place: str) -> None:
    """Unmount a file system of a test. A sandbox that another worker is just starting may hold a copy of its mounts for
    a moment, and with it a file or a loop device on them.
    """
    deadline = time.monotonic() + 60
    while (done := subprocess.run(["umount", place], capture_output=True, check=False)).returncode != 0:
        assert time.monotonic() < deadline, done.stderr
        time.sleep(0.05)


def damage_of(driver: VolumeDriver, snapshot_id: str) -> str | None:
    """Read everything the snapshot needs; what is damaged, or None."""
    try:
        for _ in driver.export_tar(snapshot_id):
            pass
    except SnapshotDamaged as error:
        return error.detail
    return None


def archive_damage_of(remote: Remote, volume: str, snapshot_id: str) -> str | None:
    """Fetch a snapshot from the archive with an empty cache; what is damaged, or None."""
    with tempfile.TemporaryDirectory() as place:
        files = os.path.join(place, "files")
        os.mkdir(files)
        try:
            Archive(remote, os.path.join(place, "cache")).fetch(volume, snapshot_id, files)
        except SnapshotDamaged as error:
            return error.detail
        finally:
            remove_tree(files)
    return None


def replace_files(driver: VolumeDriver, volume: str, directory: str) -> None:
    """Replace the files of a volume by a copy of a directory."""
    owner = CANONICAL_UID if os.geteuid() == 0 else None
    with driver.replacing(volume) as aside, opened(directory) as source, opened(aside) as target:
        copy_tree(source, target, owner)


def stored_bytes(driver: VolumeDriver) -> int:
    """Write everything to the disk; what all of it takes on the file system of the volumes."""
    with opened(driver.directory) as directory:
        libc.sync(directory)
    facts = os.statvfs(driver.directory)
    return (facts.f_blocks - facts.f_bfree) * facts.f_frsize
