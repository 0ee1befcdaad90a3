"""The interface of volume drivers, which store the files of workspaces and take immutable snapshots of them.

Drivers are synchronous: the control plane calls them from threads. Calls for different volumes run at the same time;
calls for one volume wait for each other. A driver knows nothing of sessions, sandboxes or the archive.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
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
    """A path that differs in content, kind, mode, link target or xattrs. Different times alone are not a change."""

    path: bytes
    kind: ChangeKind


@dataclass(frozen=True, slots=True)
class SnapshotFacts:
    """The size of a snapshot. `new_bytes` is what it added to the storage, or -1 where the driver cannot say.

    `files` is -1 where counting would need a walk. `skipped` counts sockets, pipes and devices, which are not stored.
    """

    bytes: int
    files: int
    new_bytes: int
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class Collected:
    """The result of a garbage collection. `damaged` names unreadable snapshots; objects they may need are kept."""

    objects: int
    bytes: int
    damaged: tuple[str, ...] = ()


class VolumeDriver(ABC):
    """Volumes and their snapshots. Their names are safe file names; anything else is `InvalidRequest`.

    A full disk or a failing host raises `PlatformError`, an exceeded cap `LimitExceeded`; both leave every volume and
    snapshot unchanged.
    """

    name: ClassVar[str]
    kernel_quota: ClassVar[bool]

    @abstractmethod
    def open(self) -> None:
        """Create or find the storage, and finish or undo the work of a killed process. Call once, before all else."""

    @abstractmethod
    def close(self) -> None:
        """Release the storage. Volumes must not be in use. May be called twice."""

    @abstractmethod
    def create(self, volume: str, cap_bytes: int | None) -> None:
        """Create an empty volume; `AlreadyExists` when it exists."""

    @property
    @abstractmethod
    def directory(self) -> str:
        """The directory that holds all volumes; known once the driver is open."""

    def path(self, volume: str) -> str:
        """Return the directory to mount. `restore` does not change it, but a mount made before shows the old files."""
        return os.path.join(self.directory, check_name(volume, "volume"))

    def exists(self, volume: str) -> bool:
        """Return whether the volume exists."""
        return os.path.isdir(self.path(volume))

    def require(self, volume: str) -> None:
        """Raise `NotFound` when there is no such volume."""
        if not self.exists(volume):
            raise NotFound(f"there is no volume {volume!r}", field="volume")

    def volumes(self) -> list[str]:
        """Return the names of all volumes, sorted."""
        return sorted(name for name in os.listdir(self.directory) if not name.startswith("."))

    @abstractmethod
    def set_cap(self, volume: str, cap_bytes: int | None) -> None:
        """Change the cap; without `kernel_quota` it is only stored. May be called while the volume is in use."""

    @abstractmethod
    def cap(self, volume: str) -> int | None:
        """Return the cap."""

    @abstractmethod
    def usage(self, volume: str) -> int:
        """Return the size of the volume in bytes. May be called at any time; `NotFound` when it does not exist."""

    @abstractmethod
    def generation(self, volume: str) -> int | None:
        """Return, in constant time, a number that changes with the volume; None where the driver has none.

        Read it before the snapshot of that state. The volume is unchanged while the number stays the same. Two kinds
        of change show only once the kernel has written them to the disk (within a minute, or after `os.sync`): one
        within a clock tick of an earlier change to the same file, and one through a memory map to a dirty page. So a
        change may show late, but it always shows.
        """

    @abstractmethod
    def snapshot(self, volume: str, snapshot_id: str, parent: str | None = None) -> SnapshotFacts:
        """Take a snapshot; may be called while a sandbox writes. `AlreadyExists` when the id is taken.

        `parent`, the snapshot the volume comes from, is only stored. A crash leaves a whole snapshot or none.
        """

    @abstractmethod
    def restore(self, volume: str, snapshot_id: str) -> None:
        """Replace the volume's files by those of the snapshot. No sandbox may use the volume.

        A crash at any point leaves the old or the new files, never a mix. `NotFound` when the snapshot does not exist,
        `SnapshotDamaged` when it cannot be read completely; both leave the volume unchanged.
        """

    @abstractmethod
    def fork(self, snapshot_id: str, new_volume: str, cap_bytes: int | None) -> None:
        """Create a volume with the snapshot's files; raises what `create` and `restore` raise."""

    @abstractmethod
    def delete_volume(self, volume: str) -> None:
        """Remove the volume if it exists, but not its snapshots. No sandbox may use it."""

    @abstractmethod
    def delete_snapshot(self, snapshot_id: str) -> None:
        """Remove the snapshot if it exists."""

    @abstractmethod
    def snapshots(self) -> list[str]:
        """Return the ids of all snapshots, sorted."""

    @abstractmethod
    def facts(self, snapshot_id: str) -> SnapshotFacts:
        """Return the facts of a snapshot; `NotFound`."""

    @abstractmethod
    def diff(self, a: str, b: str) -> list[Change]:
        """Return the changes from snapshot `a` to snapshot `b`, sorted by path."""

    @abstractmethod
    def export_tar(self, snapshot_id: str) -> Iterator[bytes]:
        """Return the snapshot as a tar stream (pax). The snapshot is not deleted during an export."""

    @abstractmethod
    def collect_garbage(self) -> Collected:
        """Remove objects that no snapshot needs. May be called at any time, from several processes."""

    def grow_if_needed(self) -> bool:
        """Grow the storage when it fills, and return whether it grew. Call it every second while sandboxes write."""
        return False

    @abstractmethod
    def replacing(self, volume: str) -> AbstractContextManager[str]:
        """Yield an empty directory that becomes the content of the volume when the block ends without an error."""

    @abstractmethod
    def write_tree(self, snapshot_id: str, directory: str) -> None:
        """Write the snapshot's files into an empty directory outside every volume."""

    @abstractmethod
    def export_objects(self, snapshot_id: str, target: ObjectStore, batch: Batch, known: Known) -> Exported:
        """Add the snapshot's objects that `target` lacks to `batch`; raises what `restore` raises.

        `known` are the facts from the last export of the same volume; without them more files are read.
        """


def check_name(name: str, field: str) -> str:
    """Check that a name is a plain file name, and return it."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{name[:80]!r} cannot name a {field}",
            field=field,
            hint="use letters, digits and . _ + : = @ -, at most 200, not starting with a sign",
        )
    return name


def check_cap(used: int, cap_bytes: int | None) -> None:
    """Raise `LimitExceeded` when content is over its cap."""
    if cap_bytes is not None and used > cap_bytes:
        raise LimitExceeded(
            f"the snapshot holds {used} bytes, more than the cap of {cap_bytes}",
            field="cap_bytes",
            hint="raise the cap or fork a smaller snapshot",
        )
