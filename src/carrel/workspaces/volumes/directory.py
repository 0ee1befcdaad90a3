"""The volume driver for every host: volumes are ordinary directories, snapshots are trees of content-addressed objects.

A snapshot stores only what changed, and equal content is stored once across all volumes. There is no kernel quota: the
cap is only stored, and the control plane watches it.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import ClassVar

from carrel.errors import AlreadyExists, NotFound, PlatformError, SnapshotDamaged
from carrel.primitives import libc, walk
from carrel.primitives.atomic import sync_directory, write_file
from carrel.primitives.keyed_lock import KeyedThreadLocks
from carrel.primitives.trees import remove_tree
from carrel.workspaces.layout import CANONICAL_UID
from carrel.workspaces.volumes import tarball
from carrel.workspaces.volumes.base import (
    Change,
    Collected,
    SnapshotFacts,
    VolumeDriver,
    check_cap,
    check_name,
)
from carrel.workspaces.volumes.capture import Known, capture, pack_known, unpack_known
from carrel.workspaces.volumes.exporting import Exported, export_tree
from carrel.workspaces.volumes.objects import Batch, ObjectStore, Reader, newest_ns, sweep
from carrel.workspaces.volumes.rebuild import rebuild
from carrel.workspaces.volumes.records import Records
from carrel.workspaces.volumes.trees import EntryKind, Node, Position, compare, mark, unpack_tree

_NEW, _OLD, _GONE = ".new-", ".old-", ".gone-"


class DirectoryDriver(VolumeDriver):
    """Volumes and snapshots beneath one directory."""

    name: ClassVar[str] = "directory"
    kernel_quota: ClassVar[bool] = False

    def __init__(self, root: str):
        self._root = os.path.abspath(root)
        self._volumes = os.path.join(self._root, "volumes")
        self._cache = os.path.join(self._root, "cache")
        self._caps = os.path.join(self._root, "caps")
        self._store = ObjectStore(self._root)
        self._records = Records(self._root, self._store.temporary)
        self._locks = KeyedThreadLocks()
        self._owner = CANONICAL_UID if os.geteuid() == 0 else None

    def open(self) -> None:
        """Create the directories; clean up after a killed process unless other processes use them."""
        with failing("cannot use the volumes' directory"):
            self._store.prepare()
            self._records.prepare()
            for path in (self._volumes, self._cache, self._caps):
                os.makedirs(path, 0o700, exist_ok=True)
            with self._store.exclusive(wait=False) as held:
                if held:
                    self._clean()

    def close(self) -> None:
        """Do nothing: nothing is held open."""

    def create(self, volume: str, cap_bytes: int | None) -> None:
        """Create an empty volume."""
        path = self.path(volume)
        with self._locks.hold(volume), self._store.shared(), failing("cannot make the volume"):
            try:
                os.mkdir(path, 0o700)
            except FileExistsError:
                raise AlreadyExists(f"volume {volume!r} already exists", field="volume") from None
            if self._owner is not None:
                os.chown(path, self._owner, self._owner)
            self._write_cap(volume, cap_bytes)

    @property
    def directory(self) -> str:
        """The directory of the volumes."""
        return self._volumes

    def set_cap(self, volume: str, cap_bytes: int | None) -> None:
        """Store the cap."""
        self.require(volume)
        with self._store.shared(), failing("cannot store the cap"):
            self._write_cap(volume, cap_bytes)

    def cap(self, volume: str) -> int | None:
        """Return the cap."""
        try:
            with open(os.path.join(self._caps, check_name(volume, "volume"))) as file:
                return int(file.read())
        except (FileNotFoundError, ValueError):
            return None

    def usage(self, volume: str) -> int:
        """Count allocated bytes, by a walk."""
        self.require(volume)
        total = 0
        linked: set[int] = set()
        with opened(self.path(volume)) as root, failing("cannot measure the volume"):
            for visited in walk.visit(root):
                total += visited.info.st_blocks * 512
                for _, info in visited.entries:
                    if stat.S_ISDIR(info.st_mode):
                        continue
                    if info.st_nlink > 1:
                        if info.st_ino in linked:
                            continue
                        linked.add(info.st_ino)
                    total += info.st_blocks * 512
        return total

    def generation(self, volume: str) -> int | None:
        """Return None: only a walk could show a change, and a snapshot does that walk anyway."""
        self.require(volume)
        return None

    def snapshot(self, volume: str, snapshot_id: str, parent: str | None = None) -> SnapshotFacts:
        """Store what changed since the last snapshot of this volume, and then the record."""
        check_name(snapshot_id, "snapshot_id")
        self.require(volume)
        with self._locks.hold(volume), self._store.shared(), failing("cannot take the snapshot"):
            if self._records.exists(snapshot_id):
                raise AlreadyExists(f"snapshot {snapshot_id!r} already exists", field="snapshot_id")
            known, generation = self._load_known(volume)
            current = self._store.generation()
            with opened(self.path(volume)) as root, Batch(self._store) as batch:
                found = capture(self._store, batch, root, known, trusted=generation == current)
                batch.finish()
                stored = batch.stored
            facts = SnapshotFacts(found.bytes, found.files, stored, found.skipped)
            self._records.publish(snapshot_id, found.tree, facts, parent)
            with suppress(OSError):  # without it only the next snapshot takes longer
                self._save_known(volume, found.known, current)
        return facts

    def restore(self, volume: str, snapshot_id: str) -> None:
        """Build the files beside the volume, then swap."""
        tree, _ = self._records.read(snapshot_id)
        self.require(volume)
        with self._locks.hold(volume), self._store.shared(), failing("cannot restore the snapshot"):
            self._fill_aside(volume, tree)

    def fork(self, snapshot_id: str, new_volume: str, cap_bytes: int | None) -> None:
        """Build the files, then give them the volume's name."""
        tree, facts = self._records.read(snapshot_id)
        check_cap(facts.bytes, cap_bytes)
        path = self.path(new_volume)
        with self._locks.hold(new_volume), self._store.shared(), failing("cannot fork the snapshot"):
            if os.path.lexists(path):
                raise AlreadyExists(f"volume {new_volume!r} already exists", field="volume")
            self._write_cap(new_volume, cap_bytes)
            self._fill_aside(new_volume, tree)

    def delete_volume(self, volume: str) -> None:
        """Rename the volume away at once, then remove its files."""
        path = self.path(volume)
        gone = os.path.join(self._volumes, _GONE + secrets.token_hex(8))
        with self._locks.hold(volume), self._store.shared(), failing("cannot remove the volume"):
            with suppress(FileNotFoundError):
                os.rename(path, gone)
                remove_tree(gone)
            for folder in (self._cache, self._caps):
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(folder, volume))

    def delete_snapshot(self, snapshot_id: str) -> None:
        """Remove the record; garbage collection removes the objects that only it needed."""
        with failing("cannot remove the snapshot"):
            self._records.remove(check_name(snapshot_id, "snapshot_id"))

    def snapshots(self) -> list[str]:
        """Return the ids of all snapshots."""
        return self._records.ids()

    def facts(self, snapshot_id: str) -> SnapshotFacts:
        """Return the facts in the record."""
        return self._records.read(snapshot_id)[1]

    def diff(self, a: str, b: str) -> list[Change]:
        """Compare the directories whose hashes differ."""
        left, right = self._records.read(a)[0], self._records.read(b)[0]
        with self._store.shared(), Reader(self._store) as reader, failing("cannot compare the snapshots"):
            return compare(left, right, lambda key: unpack_tree(reader.read(key)))

    def export_tar(self, snapshot_id: str) -> Iterator[bytes]:
        """Write the tar stream directory by directory."""
        top, _ = self._records.read(snapshot_id)
        return self._tar(top)

    def _tar(self, top: bytes) -> Iterator[bytes]:
        firsts: dict[bytes, Position] = {}
        with self._store.shared(), Reader(self._store) as reader:
            pending = [(Position(), top)]
            while pending:
                here, key = pending.pop()
                tree = unpack_tree(reader.read(key))
                folder = Node(EntryKind.DIRECTORY, tree.mode, tree.mtime_ns, xattrs=tree.xattrs)
                prefix = here.path() + b"/" if here.above else b""
                yield tarball.header(prefix or b"./", folder)
                for name, node in tree.entries.items():
                    where = here.below(name)
                    if node.kind is EntryKind.DIRECTORY:
                        pending.append((where, node.tree))
                        continue
                    first = firsts.setdefault(node.group, where) if node.group is not None else where
                    if first is not where:
                        yield tarball.header(prefix + name, node, hard_link_to=first.path())
                        continue
                    yield tarball.header(prefix + name, node)
                    if node.kind is EntryKind.FILE:
                        pieces = ((offset, reader.read(part)) for offset, _, part in node.extents)
                        yield from tarball.content(node.size, pieces)
            yield tarball.END

    def _distrust(self, damage: SnapshotDamaged) -> None:
        """Mark damaged objects, so that the next snapshot of a volume that still has the content stores it again."""
        keys = [bytes.fromhex(str(damage.extra["object"]))] if "object" in damage.extra else []
        with suppress(OSError):
            self._store.mark_damaged(keys)

    def collect_garbage(self) -> Collected:
        """Find the needed objects under the shared lock first: only the removal needs the exclusive lock for long."""
        trees: set[bytes] = set()
        parts: set[bytes] = set()
        with failing("cannot collect garbage"):
            with self._store.shared(), Reader(self._store) as reader:
                self._mark(reader, trees, parts)
            with self._store.exclusive():
                with Reader(self._store) as reader:
                    damaged = self._mark(reader, trees, parts)
                keep_ns = 0
                if damaged:
                    newest = newest_ns(self._store)
                    keep_ns = max(self._records.damaged_since(snapshot_id, newest) for snapshot_id in damaged)
                self._clean()
                return replace(sweep(self._store, trees | parts, keep_ns), damaged=tuple(damaged))

    def _mark(self, reader: Reader, trees: set[bytes], parts: set[bytes]) -> list[str]:
        """Add the objects that snapshots need, and return the snapshots that cannot be read completely."""
        damaged = []
        for snapshot_id in self.snapshots():
            try:
                mark(self._records.read(snapshot_id)[0], lambda key: unpack_tree(reader.read(key)), trees, parts)
            except NotFound:
                continue
            except SnapshotDamaged:
                damaged.append(snapshot_id)
        return damaged

    @contextmanager
    def replacing(self, volume: str) -> Iterator[str]:
        """Yield an empty directory that becomes the volume."""
        self.require(volume)
        with self._locks.hold(volume), self._store.shared(), failing("cannot replace the volume's files"):
            with self._aside(volume) as directory:
                yield directory
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(self._cache, volume))

    def write_tree(self, snapshot_id: str, directory: str) -> None:
        """Write the snapshot's files into an empty directory."""
        tree, _ = self._records.read(snapshot_id)
        with (
            failing("cannot write the snapshot's files"),
            self._store.shared(),
            Reader(self._store) as reader,
            opened(directory) as root,
        ):
            rebuild(self._store, reader, tree, root, self._owner)

    def export_objects(self, snapshot_id: str, target: ObjectStore, batch: Batch, known: Known) -> Exported:
        """Copy the objects that the other store lacks."""
        tree, facts = self._records.read(snapshot_id)
        with failing("cannot export the snapshot"), self._store.shared(), Reader(self._store) as reader:
            return Exported(tree, facts.bytes, facts.files, export_tree(reader, tree, target, batch))

    def _fill_aside(self, volume: str, tree: bytes) -> None:
        try:
            with self._aside(volume) as directory, Reader(self._store) as reader, opened(directory) as root:
                known = rebuild(self._store, reader, tree, root, self._owner)
        except SnapshotDamaged as error:
            self._distrust(error)
            raise
        with suppress(OSError):
            self._save_known(volume, known, self._store.generation())

    @contextmanager
    def _aside(self, volume: str) -> Iterator[str]:
        token = secrets.token_hex(8)
        aside = os.path.join(self._volumes, _NEW + token)
        path = self.path(volume)
        os.mkdir(aside, 0o700)
        try:
            if self._owner is not None:
                os.chown(aside, self._owner, self._owner)
            with opened(aside) as fd:
                with walk.writing_back(fd):
                    yield aside
                libc.sync(fd)  # the files must survive a crash of the host before they get the volume's name
            if not os.path.lexists(path):
                os.rename(aside, path)
                sync_directory(self._volumes)
                return
            if not libc.exchange(aside, path):
                # Two steps where the file system has no exchange: `open` undoes a crash between them.
                old = os.path.join(self._volumes, f"{_OLD}{token}-{volume}")
                os.rename(path, old)
                os.rename(aside, path)
                aside = old
            sync_directory(self._volumes)
        finally:
            remove_tree(aside)

    def _clean(self) -> None:
        """Undo the work of a killed process. The exclusive lock must be held."""
        for name in os.listdir(self._store.temporary):
            os.unlink(os.path.join(self._store.temporary, name))
        for name in os.listdir(self._volumes):
            path = os.path.join(self._volumes, name)
            if name.startswith(_OLD):
                wanted = os.path.join(self._volumes, name.split("-", 2)[2])
                if not os.path.lexists(wanted):
                    os.rename(path, wanted)
                    continue
            if name.startswith("."):
                remove_tree(path)

    def _write_cap(self, volume: str, cap_bytes: int | None) -> None:
        path = os.path.join(self._caps, volume)
        if cap_bytes is None:
            with suppress(FileNotFoundError):
                os.unlink(path)
            return
        write_file(path, str(cap_bytes).encode(), temporary=self._store.temporary)

    def _load_known(self, volume: str) -> tuple[Known, str]:
        try:
            with open(os.path.join(self._cache, volume), "rb") as file:
                return unpack_known(file.read())
        except FileNotFoundError:
            return {}, ""

    def _save_known(self, volume: str, known: Known, generation: str) -> None:
        path = os.path.join(self._cache, volume)
        write_file(path, pack_known(known, generation), temporary=self._store.temporary)


@contextmanager
def opened(path: str) -> Iterator[int]:
    """Open a directory; a link is not followed."""
    fd = os.open(path, walk.DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def failing(what: str) -> Iterator[None]:
    """Turn an `OSError` into a `PlatformError` that says what failed."""
    try:
        yield
    except OSError as error:
        where = f" at {error.filename}" if isinstance(error.filename, str) else ""
        raise PlatformError(f"{what}{where}: {error.strerror or error}", errno=error.errno) from error
