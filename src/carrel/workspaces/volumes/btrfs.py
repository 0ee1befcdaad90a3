"""The volume driver for root: a btrfs subvolume for each volume and each snapshot.

The kernel enforces the cap, knows the usage and takes a snapshot in milliseconds. The file system is that of the data
directory if it is btrfs, else one in a pool file.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import ClassVar

from carrel.errors import AlreadyExists, NotFound, Unsupported
from carrel.primitives import walk
from carrel.primitives.keyed_lock import KeyedThreadLocks
from carrel.primitives.libc import exchange
from carrel.workspaces.layout import CANONICAL_UID
from carrel.workspaces.volumes import btrfs_ioctls, btrfs_pool, plain_trees
from carrel.workspaces.volumes.base import (
    Change,
    Collected,
    SnapshotFacts,
    VolumeDriver,
    check_cap,
    check_name,
)
from carrel.workspaces.volumes.capture import Known
from carrel.workspaces.volumes.directory import failing, opened
from carrel.workspaces.volumes.exporting import Exported, export_files
from carrel.workspaces.volumes.objects import Batch, ObjectStore
from carrel.workspaces.volumes.plain_trees import copy_tree

_ASIDE = ".aside-"
_SUBVOLUME_INODE = 256
POOL_BYTES, POOL_MAX_BYTES = 8 << 30, 1024 << 30
"""The first and the largest size of a pool."""


class BtrfsDriver(VolumeDriver):
    """Volumes and snapshots as subvolumes."""

    name: ClassVar[str] = "btrfs"
    kernel_quota: ClassVar[bool] = True

    def __init__(
        self,
        root: str,
        *,
        pool_bytes: int = POOL_BYTES,
        pool_max_bytes: int = POOL_MAX_BYTES,
        first: bool = True,
        last: bool = True,
    ):
        """`first`: no other process uses the volumes yet; `last`: none uses them after `close`."""
        self._first = first
        self._last = last
        self._root = os.path.abspath(root)
        self._pool_sizes = pool_bytes, pool_max_bytes
        self._pool: btrfs_pool.Pool | None = None
        self._top = ""
        self._volumes = self._snapshots = ""
        self._locks = KeyedThreadLocks()
        self._uuid = ""

    def missing(self) -> str | None:
        """Return why the driver does not work here, or None."""
        if os.geteuid() != 0:
            return "btrfs volumes need root"
        return None if _on_btrfs(_nearest(self._root)) else btrfs_pool.missing_programs()

    def open(self) -> None:
        """Mount the pool unless the directory is on btrfs; clean up after a killed process."""
        if (reason := self.missing()) is not None:
            raise Unsupported(reason, hint="use the directory driver, or install btrfs-progs and run as root")
        with failing("cannot open the btrfs volumes"):
            os.makedirs(self._root, 0o700, exist_ok=True)
            if _on_btrfs(self._root):
                self._top = self._root
            else:
                self._top = os.path.join(self._root, "pool")
                self._pool = btrfs_pool.Pool(self._top + ".btrfs", self._top, *self._pool_sizes)
                self._pool.open()
            try:
                self._prepare()
            except BaseException:
                self.close()
                raise

    def _prepare(self) -> None:
        self._volumes = os.path.join(self._top, "volumes")
        self._snapshots = os.path.join(self._top, "snapshots")
        for path in (self._volumes, self._snapshots):
            os.makedirs(path, 0o700, exist_ok=True)
        with opened(self._top) as top:
            if self._first:
                btrfs_ioctls.enable_quota(top)
                btrfs_ioctls.rescan_quota(top)
            found = btrfs_ioctls.file_system(top)
            self._uuid = found.uuid if found is not None else ""
        if self._first:
            self._clean()

    def close(self) -> None:
        """Unmount the pool, unless others use it."""
        if self._pool is not None and self._last:
            self._pool.close()

    def create(self, volume: str, cap_bytes: int | None) -> None:
        """Create a subvolume with its limit."""
        path = self.path(volume)
        with self._locks.hold(volume), failing("cannot make the volume"):
            if os.path.lexists(path):
                raise AlreadyExists(f"volume {volume!r} already exists", field="volume")
            self._grow()
            with self._aside() as aside:
                self._make(aside, cap_bytes)
                os.rename(aside, path)

    @property
    def directory(self) -> str:
        """The directory of the subvolumes."""
        return self._volumes

    def set_cap(self, volume: str, cap_bytes: int | None) -> None:
        """Change the limit from the next write on."""
        with self._locks.hold(volume), failing("cannot set the cap"), self._opened(volume) as fd:
            btrfs_ioctls.set_limit(fd, cap_bytes)

    def cap(self, volume: str) -> int | None:
        """Return the limit that the kernel enforces."""
        with failing("cannot read the cap"), self._opened(volume) as fd:
            return btrfs_ioctls.referenced(fd)[1]

    def usage(self, volume: str) -> int:
        """Return what the kernel has counted, and what was written since."""
        with failing("cannot read the usage"), self._opened(volume) as fd:
            used = btrfs_ioctls.uncommitted_bytes(fd, self._uuid)
            return used + btrfs_ioctls.referenced(fd)[0]

    def generation(self, volume: str) -> int | None:
        """Return the transaction of the last change. If it still runs it is ended, so that a later change belongs to a
        later transaction.
        """
        with failing("cannot find out whether the volume changed"), self._opened(volume) as fd:
            changed = btrfs_ioctls.changed_in(fd)
            newest = btrfs_ioctls.file_system(fd)
            if newest is None or changed >= newest.transaction:
                btrfs_ioctls.commit(fd)
            return changed

    def snapshot(self, volume: str, snapshot_id: str, parent: str | None = None) -> SnapshotFacts:
        """Make a read-only subvolume that shares every block."""
        self.require(volume)
        target = self._snapshot_path(snapshot_id)
        with self._locks.hold(volume), failing("cannot take the snapshot"):
            try:
                if os.path.lexists(target):
                    raise FileExistsError
                self._grow()
                with opened(self.path(volume)) as source, opened(self._snapshots) as folder:
                    btrfs_ioctls.create_snapshot(source, folder, snapshot_id, read_only=True)
            except FileExistsError:
                raise AlreadyExists(f"snapshot {snapshot_id!r} already exists", field="snapshot_id") from None
            return self.facts(snapshot_id)

    def restore(self, volume: str, snapshot_id: str) -> None:
        """Replace the volume by a writable snapshot of the snapshot, in one step."""
        source = self._source(snapshot_id)
        self.require(volume)
        with self._locks.hold(volume), failing("cannot restore the snapshot"):
            path = self.path(volume)
            cap = self.cap(volume)
            self._grow()
            with self._aside() as aside:
                self._copy(source, aside, cap)
                self._swap(aside, path)

    def fork(self, snapshot_id: str, new_volume: str, cap_bytes: int | None) -> None:
        """Make a writable snapshot of the snapshot under a new name."""
        source = self._source(snapshot_id)
        path = self.path(new_volume)
        if cap_bytes is not None:
            check_cap(self.facts(snapshot_id).bytes, cap_bytes)
        with self._locks.hold(new_volume), failing("cannot fork the snapshot"):
            if os.path.lexists(path):
                raise AlreadyExists(f"volume {new_volume!r} already exists", field="volume")
            self._grow()
            with self._aside() as aside:
                self._copy(source, aside, cap_bytes)
                os.rename(aside, path)
                self._commit()

    def delete_volume(self, volume: str) -> None:
        """Remove the subvolume."""
        path = self.path(volume)
        with self._locks.hold(volume), failing("cannot remove the volume"):
            self._drop(path)

    def delete_snapshot(self, snapshot_id: str) -> None:
        """Remove the subvolume."""
        with failing("cannot remove the snapshot"):
            self._drop(self._snapshot_path(snapshot_id))

    def snapshots(self) -> list[str]:
        """Return the ids of all snapshots."""
        return sorted(name for name in os.listdir(self._snapshots) if not name.startswith("."))

    def facts(self, snapshot_id: str) -> SnapshotFacts:
        """Return what the kernel has counted; it does not count files."""
        source = self._source(snapshot_id)
        with failing("cannot read the size of the snapshot"), opened(source) as fd:
            return SnapshotFacts(btrfs_ioctls.referenced(fd)[0], -1, -1)

    def diff(self, a: str, b: str) -> list[Change]:
        """Walk both; content is read only where a file's ctime differs."""
        with failing("cannot compare the snapshots"), opened(self._source(a)) as one, opened(self._source(b)) as other:
            return plain_trees.compare(one, other)

    def export_tar(self, snapshot_id: str) -> Iterator[bytes]:
        """Walk the read-only subvolume."""
        source = self._source(snapshot_id)

        def stream() -> Iterator[bytes]:
            with failing("cannot export the snapshot"), opened(source) as root:
                yield from plain_trees.tar(root)

        return stream()

    def collect_garbage(self) -> Collected:
        """Return freed blocks to the host; remove quota groups of removed subvolumes."""
        with failing("cannot collect garbage"), opened(self._top) as top:
            btrfs_ioctls.commit(top)  # the kernel frees what was removed after a commit
            btrfs_ioctls.remove_stale_groups(top)
            if self._pool is not None:
                self._pool.trim()
        return Collected(0, 0)

    @contextmanager
    def replacing(self, volume: str) -> Iterator[str]:
        """Yield a new subvolume that replaces the volume."""
        self.require(volume)
        with self._locks.hold(volume), failing("cannot replace the volume's files"):
            path = self.path(volume)
            cap = self.cap(volume)
            self._grow()
            with self._aside() as aside:
                self._make(aside, cap)
                yield aside
                self._swap(aside, path)

    def write_tree(self, snapshot_id: str, directory: str) -> None:
        """Copy the read-only subvolume's files."""
        with (
            failing("cannot write the snapshot's files"),
            opened(self._source(snapshot_id)) as source,
            opened(directory) as target,
        ):
            copy_tree(source, target, CANONICAL_UID)

    def export_objects(self, snapshot_id: str, target: ObjectStore, batch: Batch, known: Known) -> Exported:
        """Read the files of the read-only subvolume that the other store lacks."""
        source = self._source(snapshot_id)
        with failing("cannot export the snapshot"), opened(source) as root:
            exported = export_files(root, target, batch, known)
            self._source(snapshot_id)  # had it been removed meanwhile, files would be missing silently
            return exported

    def _make(self, path: str, cap_bytes: int | None) -> None:
        """Create an empty subvolume with its owner and limit; nothing uses it before it has its final name."""
        with opened(self._volumes) as folder:
            btrfs_ioctls.create_subvolume(folder, os.path.basename(path))
        with opened(path) as fd:
            os.fchmod(fd, 0o700)
            os.fchown(fd, CANONICAL_UID, CANONICAL_UID)
            btrfs_ioctls.set_limit(fd, cap_bytes)

    def _copy(self, source: str, path: str, cap_bytes: int | None) -> None:
        """Make a writable snapshot of a snapshot, with a limit."""
        with opened(source) as origin, opened(self._volumes) as folder:
            btrfs_ioctls.create_snapshot(origin, folder, os.path.basename(path), read_only=False)
        with opened(path) as fd:
            btrfs_ioctls.set_limit(fd, cap_bytes)

    def _swap(self, aside: str, path: str) -> None:
        exchange(aside, path)
        self._commit()

    def _commit(self) -> None:
        """Make the new state durable: a crash of the host does not bring the old state back."""
        with opened(self._top) as top:
            btrfs_ioctls.commit(top)

    @contextmanager
    def _opened(self, volume: str) -> Iterator[int]:
        try:
            fd = os.open(self.path(volume), walk.DIRECTORY)
        except FileNotFoundError:
            raise NotFound(f"there is no volume {volume!r}", field="volume") from None
        try:
            yield fd
        finally:
            os.close(fd)

    def _grow(self) -> None:
        if self._pool is not None:
            self._pool.require_room()
            self._pool.grow_when_full()

    def grow_if_needed(self) -> bool:
        """Grow the pool when it fills, and let the kernel count again when its figures are inconsistent.

        Costs microseconds when there is nothing to do.
        """
        with failing("cannot check the volumes"), opened(self._top) as top:
            btrfs_ioctls.rescan_quota(top)
        return self._pool is not None and self._pool.grow_when_full()

    def _snapshot_path(self, snapshot_id: str) -> str:
        return os.path.join(self._snapshots, check_name(snapshot_id, "snapshot_id"))

    def _source(self, snapshot_id: str) -> str:
        path = self._snapshot_path(snapshot_id)
        if not os.path.isdir(path):
            raise NotFound(f"there is no snapshot {snapshot_id!r}", field="snapshot_id")
        return path

    @contextmanager
    def _aside(self) -> Iterator[str]:
        aside = os.path.join(self._volumes, _ASIDE + secrets.token_hex(8))
        try:
            yield aside
        finally:
            self._drop(aside)

    def _drop(self, path: str) -> None:
        """Delete a subvolume, whatever is in it. The kernel removes its quota group later."""
        try:
            if os.stat(path, follow_symlinks=False).st_ino != _SUBVOLUME_INODE:
                os.rmdir(path)
                return
        except FileNotFoundError:
            return
        with opened(os.path.dirname(path)) as folder, suppress(FileNotFoundError):  # another thread was faster
            btrfs_ioctls.delete_subvolume(folder, os.path.basename(path))

    def _clean(self) -> None:
        for folder in (self._volumes, self._snapshots):
            for name in os.listdir(folder):
                if not name.startswith("."):
                    continue
                path = os.path.join(folder, name)
                if os.stat(path).st_ino != _SUBVOLUME_INODE:
                    for inner in os.listdir(path):
                        self._drop(os.path.join(path, inner))
                self._drop(path)


def _nearest(path: str) -> str:
    """Return the path, or the nearest existing directory above it."""
    while not os.path.isdir(path) and path != "/":
        path = os.path.dirname(path)
    return path


def _on_btrfs(path: str) -> bool:
    with opened(path) as fd:
        return btrfs_ioctls.file_system(fd) is not None
