"""The volume driver for root: a btrfs subvolume for each volume and each snapshot.

The kernel holds the cap, knows the usage and takes a snapshot in milliseconds. The file system is the one the data
directory lies on when that is btrfs, else a pool file. Knows nothing of sandboxes.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import ClassVar

from carrel.errors import AlreadyExists, NotFound, PlatformError
from carrel.workspaces.layout import CANONICAL_UID
from carrel.workspaces.volumes import pool, quota, walking
from carrel.workspaces.volumes.base import (
    Change,
    Collected,
    NameLocks,
    SnapshotFacts,
    VolumeDriver,
    VolumeUsage,
    check_cap,
    check_name,
)
from carrel.workspaces.volumes.copying import copy_tree
from carrel.workspaces.volumes.directory import failing, opened
from carrel.workspaces.volumes.kernel import exchange

_ASIDE = ".aside-"
_SUBVOLUME_INODE = 256
_GIB = 1 << 30


class BtrfsDriver(VolumeDriver):
    """Volumes and snapshots as subvolumes."""

    name: ClassVar[str] = "btrfs"
    kernel_quota: ClassVar[bool] = True

    def __init__(self, root: str, *, pool_bytes: int = 8 * _GIB, pool_max_bytes: int = 1024 * _GIB):
        self._root = os.path.abspath(root)
        self._pool_sizes = pool_bytes, pool_max_bytes
        self._pool: pool.Pool | None = None
        self._top = ""
        self._volumes = self._snapshots = ""
        self._locks = NameLocks()
        self._quota = threading.Lock()

    def missing(self) -> str | None:
        """Root, btrfs-progs and a kernel with btrfs."""
        return pool.missing_programs()

    def open(self) -> None:
        """Mount the pool unless the directory is on btrfs; remove what a killed process left."""
        pool.require_programs()
        with failing("cannot open the btrfs volumes"):
            os.makedirs(self._root, 0o700, exist_ok=True)
            if _file_system(self._root) == "btrfs":
                self._top = self._root
            else:
                self._top = os.path.join(self._root, "pool")
                self._pool = pool.Pool(self._top + ".btrfs", self._top, *self._pool_sizes)
                self._pool.open()
            self._volumes = os.path.join(self._top, "volumes")
            self._snapshots = os.path.join(self._top, "snapshots")
            self._enable_quota()
            for path in (self._volumes, self._snapshots):
                os.makedirs(path, 0o700, exist_ok=True)
            self._clean()

    def _enable_quota(self) -> None:
        try:
            pool.run("btrfs", "qgroup", "show", self._top)
        except PlatformError:
            pool.run("btrfs", "quota", "enable", self._top)

    def close(self) -> None:
        """Unmount the pool."""
        if self._pool is not None:
            self._pool.close()

    def create(self, volume: str, cap_bytes: int | None) -> None:
        """Make a subvolume with its limit."""
        path = self.path(volume)
        with self._locks.hold(volume), failing("cannot make the volume"):
            if os.path.lexists(path):
                raise AlreadyExists(f"there is a volume {volume!r}", field="volume")
            self._grow()
            with self._aside() as aside:
                pool.run("btrfs", "subvolume", "create", aside)
                os.chmod(aside, 0o700)
                os.chown(aside, CANONICAL_UID, CANONICAL_UID)
                self._limit(aside, cap_bytes)
                os.rename(aside, path)

    def path(self, volume: str) -> str:
        """The subvolume to mount."""
        return os.path.join(self._volumes, check_name(volume, "volume"))

    def exists(self, volume: str) -> bool:
        """Whether the volume is there."""
        return os.path.isdir(self.path(volume))

    def volumes(self) -> list[str]:
        """The names of all volumes."""
        return sorted(name for name in os.listdir(self._volumes) if not name.startswith("."))

    def set_cap(self, volume: str, cap_bytes: int | None) -> None:
        """Change the limit; it holds from the next write on."""
        self._require(volume)
        with self._locks.hold(volume):
            self._limit(self.path(volume), cap_bytes)

    def cap(self, volume: str) -> int | None:
        """The limit the kernel holds."""
        self._require(volume)
        return self._qgroup(self.path(volume))[1]

    def usage(self, volume: str) -> VolumeUsage:
        """What the kernel has counted."""
        self._require(volume)
        return VolumeUsage(self._qgroup(self.path(volume))[0], constant_time=True)

    def snapshot(self, volume: str, snapshot_id: str, parent: str | None = None) -> SnapshotFacts:
        """A read-only subvolume that shares every block."""
        self._require(volume)
        target = self._snapshot_path(snapshot_id)
        with self._locks.hold(volume), failing("cannot take the snapshot"):
            if os.path.lexists(target):
                raise AlreadyExists(f"there is a snapshot {snapshot_id!r}", field="snapshot_id")
            self._grow()
            pool.run("btrfs", "subvolume", "snapshot", "-r", self.path(volume), target)
            return self.facts(snapshot_id)

    def restore(self, volume: str, snapshot_id: str) -> None:
        """A writable snapshot of the snapshot takes the volume's place in one step."""
        source = self._source(snapshot_id)
        self._require(volume)
        with self._locks.hold(volume), failing("cannot restore the snapshot"):
            path = self.path(volume)
            cap = self._qgroup(path)[1]
            with self._aside() as aside:
                pool.run("btrfs", "subvolume", "snapshot", source, aside)
                self._limit(aside, cap)
                exchange(aside, path)

    def fork(self, snapshot_id: str, new_volume: str, cap_bytes: int | None) -> None:
        """A writable snapshot of the snapshot under a new name."""
        source = self._source(snapshot_id)
        path = self.path(new_volume)
        if cap_bytes is not None:
            check_cap(self._qgroup(source)[0], cap_bytes)
        with self._locks.hold(new_volume), failing("cannot fork the snapshot"):
            if os.path.lexists(path):
                raise AlreadyExists(f"there is a volume {new_volume!r}", field="volume")
            self._grow()
            with self._aside() as aside:
                pool.run("btrfs", "subvolume", "snapshot", source, aside)
                self._limit(aside, cap_bytes)
                os.rename(aside, path)

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
        """The ids of all snapshots."""
        return sorted(name for name in os.listdir(self._snapshots) if not name.startswith("."))

    def facts(self, snapshot_id: str) -> SnapshotFacts:
        """What the kernel has counted; it does not count files."""
        used, _ = self._qgroup(self._source(snapshot_id))
        return SnapshotFacts(used, -1, -1)

    def diff(self, a: str, b: str) -> list[Change]:
        """Walk both; content is read only where a file's change time differs."""
        with failing("cannot compare the snapshots"), opened(self._source(a)) as one, opened(self._source(b)) as other:
            return walking.compare(one, other)

    def export_tar(self, snapshot_id: str) -> Iterator[bytes]:
        """Walk the read-only subvolume."""
        source = self._source(snapshot_id)

        def stream() -> Iterator[bytes]:
            with failing("cannot export the snapshot"), opened(source) as root:
                yield from walking.tar(root)

        return stream()

    def verify(self, snapshot_id: str) -> list[str]:
        """Read every byte: the file system compares its check sums."""
        with opened(self._source(snapshot_id)) as root:
            return walking.unreadable(root)

    def collect_garbage(self) -> Collected:
        """Nothing to find: the kernel frees a subvolume's blocks itself. Quota groups without one are removed."""
        with suppress(PlatformError):
            pool.run("btrfs", "qgroup", "clear-stale", self._top)
        return Collected(0, 0)

    @contextmanager
    def replacing(self, volume: str) -> Iterator[str]:
        """A fresh subvolume that takes the volume's place."""
        self._require(volume)
        with self._locks.hold(volume), failing("cannot replace the volume's files"):
            path = self.path(volume)
            cap = self._qgroup(path)[1]
            with self._aside() as aside:
                pool.run("btrfs", "subvolume", "create", aside)
                os.chmod(aside, 0o700)
                os.chown(aside, CANONICAL_UID, CANONICAL_UID)
                self._limit(aside, cap)
                yield aside
                exchange(aside, path)

    def write_tree(self, snapshot_id: str, directory: str) -> None:
        """Copy the read-only subvolume's files."""
        with (
            failing("cannot write the snapshot's files"),
            opened(self._source(snapshot_id)) as source,
            opened(directory) as target,
        ):
            copy_tree(source, target, CANONICAL_UID)

    def import_tree(self, volume: str, directory: str) -> None:
        """Replace the volume's files by a copy."""
        with self.replacing(volume) as aside, opened(directory) as source, opened(aside) as target:
            copy_tree(source, target, CANONICAL_UID)

    def send_stream(self, snapshot_id: str, parent: str | None = None) -> Iterator[bytes]:
        """The snapshot for another btrfs; with `parent` only what differs from that snapshot, which must be there."""
        source = self._source(snapshot_id)
        since = ["-p", self._source(parent)] if parent is not None else []

        def stream() -> Iterator[bytes]:
            argv = ["btrfs", "send", "--quiet", *since, source]
            with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
                assert process.stdout is not None
                assert process.stderr is not None
                try:
                    while piece := process.stdout.read(1 << 20):
                        yield piece
                    said = process.stderr.read().decode(errors="replace").strip()
                finally:
                    if process.poll() is None:
                        process.kill()
            if process.returncode != 0:
                raise PlatformError(f"the snapshot could not be sent: {said}")

        return stream()

    def receive(self, snapshot_id: str, stream: Iterator[bytes]) -> None:
        """Make a snapshot from a stream; its parent, if it has one, must have been received before."""
        target = self._snapshot_path(snapshot_id)
        if os.path.lexists(target):
            raise AlreadyExists(f"there is a snapshot {snapshot_id!r}", field="snapshot_id")
        aside = os.path.join(self._snapshots, _ASIDE + secrets.token_hex(8))
        os.mkdir(aside, 0o700)
        try:
            self._feed(aside, stream)
            [received] = os.listdir(aside)
            # A read-only subvolume may not move between directories; its parent's name is what is changed.
            pool.run("btrfs", "subvolume", "snapshot", "-r", os.path.join(aside, received), target)
        except ValueError:
            raise PlatformError("the stream holds no snapshot") from None
        finally:
            for name in os.listdir(aside):
                self._drop(os.path.join(aside, name))
            os.rmdir(aside)

    @staticmethod
    def _feed(aside: str, stream: Iterator[bytes]) -> None:
        argv = ["btrfs", "receive", "--quiet", aside]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stderr is not None
            try:
                with suppress(BrokenPipeError):
                    for piece in stream:
                        process.stdin.write(piece)
                with suppress(BrokenPipeError):
                    process.stdin.close()
                said = process.stderr.read().decode(errors="replace").strip()
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            raise PlatformError(f"the snapshot could not be received: {said}")

    def _limit(self, path: str, cap_bytes: int | None) -> None:
        pool.run("btrfs", "qgroup", "limit", str(cap_bytes) if cap_bytes is not None else "none", path)

    @staticmethod
    def _qgroup(path: str) -> tuple[int, int | None]:
        with failing("cannot read the quota"):
            return quota.referenced(path)

    def _grow(self) -> None:
        if self._pool is not None:
            self._pool.grow_when_full()

    def stored_bytes(self) -> int:
        """What everything together takes on the file system."""
        pool.run("btrfs", "filesystem", "sync", self._top)
        facts = os.statvfs(self._top)
        return (facts.f_blocks - facts.f_bfree) * facts.f_frsize

    def tend(self) -> bool:
        """Grow the pool when it fills; call it every few seconds while sandboxes write."""
        return self._pool is not None and self._pool.grow_when_full()

    def _require(self, volume: str) -> None:
        if not self.exists(volume):
            raise NotFound(f"there is no volume {volume!r}", field="volume")

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
        """Delete a subvolume and its quota group; what the agent's tree holds is never looked at."""
        try:
            if os.stat(path, follow_symlinks=False).st_ino != _SUBVOLUME_INODE:
                os.rmdir(path)
                return
        except FileNotFoundError:
            return
        with opened(path) as fd:
            number = quota.number_of(fd)
        pool.run("btrfs", "subvolume", "delete", path)
        with self._quota, suppress(PlatformError):
            pool.run("btrfs", "qgroup", "destroy", f"0/{number}", self._top)

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


def _file_system(path: str) -> str:
    listing = pool.run("stat", "--file-system", "--format=%T", path)
    return listing.decode().strip()
