"""Snapshots wherever they are: on this server, or only in the archive. Blocking; knows only records of snapshots."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from carrel.errors import NotFound, SnapshotDamaged
from carrel.primitives.trees import remove_tree
from carrel.store.snapshots import SnapshotRecord
from carrel.workspaces.archive import Archive
from carrel.workspaces.layout import encode
from carrel.workspaces.volumes import Change, VolumeDriver, plain_trees
from carrel.workspaces.volumes.directory import opened


class StoredSnapshots:
    """Reads snapshots from the volume driver, else from the archive."""

    def __init__(self, driver: VolumeDriver, archive: Archive, cache: str):
        self._driver = driver
        self._archive = archive
        self._cache = cache

    def restore(self, snapshot: SnapshotRecord, target: str) -> None:
        """Replace the files of an existing volume by those of a snapshot."""
        volume = encode(snapshot.context_id, ephemeral=False)
        try:
            self._driver.restore(target, snapshot.id)
        except (SnapshotDamaged, NotFound):
            if not snapshot.archived:
                raise
            with self._driver.replacing(target) as directory:
                self._archive.fetch(volume, snapshot.id, directory)

    def fork(self, snapshot: SnapshotRecord, target: str, cap: int | None) -> None:
        """Make a volume with the files of a snapshot."""
        source = encode(snapshot.context_id, ephemeral=False)
        try:
            self._driver.fork(snapshot.id, target, cap)
        except (SnapshotDamaged, NotFound):
            if not snapshot.archived:
                raise
            self._driver.create(target, cap)
            try:
                with self._driver.replacing(target) as directory:
                    self._archive.fetch(source, snapshot.id, directory)
            except BaseException:
                self._driver.delete_volume(target)
                raise

    def diff(self, before: SnapshotRecord, after: SnapshotRecord) -> list[Change]:
        """Return the changes between two snapshots."""
        try:
            return self._driver.diff(before.id, after.id)
        except (SnapshotDamaged, NotFound):
            if not (self._has(before) and self._has(after)):
                raise
        with self._unpacked(before) as left, self._unpacked(after) as right:
            return plain_trees.compare(left, right)

    def tar(self, snapshot: SnapshotRecord) -> Iterator[bytes]:
        """Yield a snapshot as a tar stream."""
        try:
            self._driver.facts(snapshot.id)
        except (SnapshotDamaged, NotFound):
            if not snapshot.archived:
                raise
            with self._unpacked(snapshot) as root:
                yield from plain_trees.tar(root)
        else:
            yield from self._driver.export_tar(snapshot.id)
            self._driver.facts(snapshot.id)  # raises if it was deleted meanwhile: then only a part was read

    def _has(self, snapshot: SnapshotRecord) -> bool:
        return snapshot.archived or snapshot.id in self._driver.snapshots()

    @contextmanager
    def _unpacked(self, snapshot: SnapshotRecord) -> Iterator[int]:
        """Unpack a snapshot into a temporary directory for the block."""
        volume = encode(snapshot.context_id, ephemeral=False)
        with tempfile.TemporaryDirectory(prefix="snapshot-", dir=self._cache) as directory:
            try:
                self._driver.write_tree(snapshot.id, directory)
            except (SnapshotDamaged, NotFound):
                remove_tree(directory)
                os.mkdir(directory, 0o700)
                self._archive.fetch(volume, snapshot.id, directory)
            with opened(directory) as root:
                yield root
            remove_tree(
                directory
            )  # unlike the cleanup of `tempfile`, this works with any permissions that the agent set
            os.mkdir(directory)
