"""Snapshots wherever they lie: on this server, or only in the archive. Blocking; knows no record but the snapshot's."""

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
    """What the volume driver has, and else the archive."""

    def __init__(self, driver: VolumeDriver, archive: Archive, cache: str):
        self._driver = driver
        self._archive = archive
        self._cache = cache

    def restore(self, snapshot: SnapshotRecord, target: str) -> None:
        """Replace the files of an existing volume by the snapshot's."""
        volume = encode(snapshot.context_id, ephemeral=False)
        try:
            self._driver.restore(target, snapshot.id)
        except (SnapshotDamaged, NotFound):
            if not snapshot.archived:
                raise
            with self._driver.replacing(target) as directory:
                self._archive.fetch(volume, snapshot.id, directory)

    def fork(self, snapshot: SnapshotRecord, target: str, cap: int | None) -> None:
        """Make a volume with the snapshot's files."""
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
        """What leads from one snapshot to the other."""
        try:
            return self._driver.diff(before.id, after.id)
        except (SnapshotDamaged, NotFound):
            if not (self._has(before) and self._has(after)):
                raise
        with self._unpacked(before) as left, self._unpacked(after) as right:
            return plain_trees.compare(left, right)

    def tar(self, snapshot: SnapshotRecord) -> Iterator[bytes]:
        """A snapshot as a tar stream."""
        try:
            self._driver.facts(snapshot.id)
        except (SnapshotDamaged, NotFound):
            if not snapshot.archived:
                raise
            with self._unpacked(snapshot) as root:
                yield from plain_trees.tar(root)
        else:
            yield from self._driver.export_tar(snapshot.id)
            self._driver.facts(snapshot.id)  # one that was deleted meanwhile may have been read in part

    def _has(self, snapshot: SnapshotRecord) -> bool:
        return snapshot.archived or snapshot.id in self._driver.snapshots()

    @contextmanager
    def _unpacked(self, snapshot: SnapshotRecord) -> Iterator[int]:
        """The files of a snapshot in a directory of their own, for as long as the block lasts."""
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
            remove_tree(directory)  # which needs no permission of the agent's, unlike what Python would do
            os.mkdir(directory)
