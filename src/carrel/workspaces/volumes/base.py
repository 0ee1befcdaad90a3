"""What a volume driver is: it keeps the files of workspaces and takes immutable snapshots of them.

Drivers are synchronous: the control plane calls them from threads. Different volumes may be worked on at the same
time; calls for one volume wait for one another. A driver knows nothing of sessions, sandboxes or the archive.
"""

from __future__ import annotations

import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from carrel.errors import InvalidRequest, LimitExceeded, NotFound

if TYPE_CHECKING:
    from carrel.workspaces.volumes.capture import Known
    from carrel.workspaces.volumes.exporting import Exported
    from carrel.workspaces.volumes.objects import Batch, ObjectStore

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+:=@-]{0,199}")


class ChangeKind(StrEnum):
    """How a path differs between two snapshots."""

    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"


@dataclass(frozen=True, slots=True)
class Change:
    """One path that differs. Times alone are no change; content, kind, mode, link target and xattrs are."""

    path: bytes
    kind: ChangeKind


@dataclass(frozen=True, slots=True)
class SnapshotFacts:
    """What a snapshot holds. `new_bytes` is what it added to the storage, or -1 where the driver cannot tell.

    `files` is -1 where counting would mean a walk. `skipped` counts sockets, pipes and devices, which are not kept.
    """

    bytes: int
    files: int
    new_bytes: int
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class Collected:
    """What a garbage collection removed. `damaged` names snapshots that cannot be read; what they may need is kept."""

    objects: int
    bytes: int
    damaged: tuple[str, ...] = ()


class VolumeDriver(ABC):
    """Volumes and their snapshots. Names of both are safe file names; anything else is `InvalidRequest`.

    A full disk or a failing host raises `PlatformError`, a passed cap `LimitExceeded`, and both leave every volume
    and every snapshot as it was.
    """

    name: ClassVar[str]
    kernel_quota: ClassVar[bool]

    @abstractmethod
    def open(self) -> None:
        """Make or find the storage, and finish or undo what a killed process left. Call once, before all else."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the storage. Volumes must not be in use. May be called twice."""

    @abstractmethod
    def create(self, volume: str, cap_bytes: int | None) -> None:
        """Make an empty volume; `AlreadyExists` when there is one."""

    @property
    @abstractmethod
    def directory(self) -> str:
        """The directory that all volumes lie in; known once the driver is open."""

    def path(self, volume: str) -> str:
        """The directory to mount. It stays the same over `restore`, but a mount made before shows the old files."""
        return os.path.join(self.directory, check_name(volume, "volume"))

    def exists(self, volume: str) -> bool:
        """Whether the volume is there."""
        return os.path.isdir(self.path(volume))

    def require(self, volume: str) -> None:
        """Raise `NotFound` when there is no such volume."""
        if not self.exists(volume):
            raise NotFound(f"there is no volume {volume!r}", field="volume")

    def volumes(self) -> list[str]:
        """The names of all volumes, sorted."""
        return sorted(name for name in os.listdir(self.directory) if not name.startswith("."))

    @abstractmethod
    def set_cap(self, volume: str, cap_bytes: int | None) -> None:
        """Change the cap; without `kernel_quota` it is only kept. May be called while the volume is in use."""

    @abstractmethod
    def cap(self, volume: str) -> int | None:
        """The cap that was set."""

    @abstractmethod
    def usage(self, volume: str) -> int:
        """How many bytes the volume holds. May be called at any time; `NotFound` when there is no such volume."""

    @abstractmethod
    def generation(self, volume: str) -> int | None:
        """A number that changes when the volume does, told in constant time; None where the driver cannot tell.

        Ask before taking the snapshot that shall hold the state; the volume is unchanged while the number is the same.
        A change shows at once, but for two kinds that show when the kernel has written them to the disk (within a
        minute, or by `os.sync`): one within a clock tick of an earlier one to the same file, and one through a memory
        map to a page that was not yet written back. So a change may be seen late, never not at all.
        """

    @abstractmethod
    def snapshot(self, volume: str, snapshot_id: str, parent: str | None = None) -> SnapshotFacts:
        """Take a picture; may be called while a sandbox writes. `AlreadyExists` when the id is taken.

        `parent` is the snapshot the volume comes from, kept as a fact. A crash leaves either all of it or nothing.
        """

    @abstractmethod
    def restore(self, volume: str, snapshot_id: str) -> None:
        """Replace the volume's files by the snapshot's. No sandbox may use the volume.

        A crash at any point leaves the old or the new files, never a mix. `NotFound` when there is no such snapshot,
        `SnapshotDamaged` when it cannot be read whole; the volume is then as it was.
        """

    @abstractmethod
    def fork(self, snapshot_id: str, new_volume: str, cap_bytes: int | None) -> None:
        """Make a new volume with the snapshot's files; raises what `create` and `restore` raise."""

    @abstractmethod
    def delete_volume(self, volume: str) -> None:
        """Remove the volume, not its snapshots. Nothing happens when there is none. No sandbox may use it."""

    @abstractmethod
    def delete_snapshot(self, snapshot_id: str) -> None:
        """Remove the snapshot. Nothing happens when there is none."""

    @abstractmethod
    def snapshots(self) -> list[str]:
        """The ids of all whole snapshots, sorted."""

    @abstractmethod
    def facts(self, snapshot_id: str) -> SnapshotFacts:
        """What the snapshot holds, as told when it was taken; `NotFound`."""

    @abstractmethod
    def diff(self, a: str, b: str) -> list[Change]:
        """What leads from snapshot `a` to snapshot `b`, sorted by path."""

    @abstractmethod
    def export_tar(self, snapshot_id: str) -> Iterator[bytes]:
        """The snapshot as a tar stream (pax). The snapshot is not deleted under a running export."""

    @abstractmethod
    def collect_garbage(self) -> Collected:
        """Remove what no snapshot needs. May be called at any time, from several processes."""

    def tend(self) -> bool:
        """Look after the storage, and say whether anything was done. Call it every second while sandboxes write."""
        return False

    @abstractmethod
    def replacing(self, volume: str) -> AbstractContextManager[str]:
        """An empty directory that becomes the content of the existing volume when the block ends without an error."""

    @abstractmethod
    def write_tree(self, snapshot_id: str, directory: str) -> None:
        """Write the snapshot's files into an empty directory outside every volume."""

    @abstractmethod
    def export_objects(self, snapshot_id: str, target: ObjectStore, batch: Batch, known: Known) -> Exported:
        """Put into `batch` what `target` lacks of the snapshot; raises what `restore` raises.

        `known` is what the last export of a snapshot of the same volume found; without it more is read.
        """


def check_name(name: str, field: str) -> str:
    """Refuse a name that is no plain file name."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{name[:80]!r} cannot name a {field}",
            field=field,
            hint="use letters, digits and . _ + : = @ -, at most 200, not starting with a sign",
        )
    return name


def check_cap(used: int, cap_bytes: int | None) -> None:
    """Refuse content that is over its cap."""
    if cap_bytes is not None and used > cap_bytes:
        raise LimitExceeded(
            f"the snapshot holds {used} bytes, more than the cap of {cap_bytes}",
            field="cap_bytes",
            hint="raise the cap or fork a smaller snapshot",
        )


class NameLocks:
    """One lock for each name in use: work on one volume waits, work on others goes on."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[str, tuple[threading.RLock, int]] = {}

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Hold the lock of a name."""
        with self._guard:
            lock, users = self._locks.get(name, (threading.RLock(), 0))
            self._locks[name] = lock, users + 1
        try:
            with lock:
                yield
        finally:
            with self._guard:
                lock, users = self._locks[name]
                if users == 1:
                    del self._locks[name]
                else:
                    self._locks[name] = lock, users - 1
