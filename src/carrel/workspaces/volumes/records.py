"""The records of snapshots: a small file each, with a check sum."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict

from carrel.errors import AlreadyExists, NotFound, SnapshotDamaged
from carrel.primitives.atomic import sync_directory, write_file
from carrel.workspaces.volumes.base import SnapshotFacts, check_name
from carrel.workspaces.volumes.objects import digest

_LARGEST = 1 << 16


class Records:
    """The records below one directory."""

    def __init__(self, root: str, temporary: str):
        self._directory = os.path.join(root, "snapshots")
        self._damaged = os.path.join(root, "damaged")
        self._temporary = temporary

    def prepare(self) -> None:
        """Create the directories."""
        for path in (self._directory, self._damaged):
            os.makedirs(path, 0o700, exist_ok=True)

    def _path(self, snapshot_id: str) -> str:
        return os.path.join(self._directory, check_name(snapshot_id, "snapshot_id"))

    def exists(self, snapshot_id: str) -> bool:
        """Return whether the id is taken."""
        return os.path.exists(self._path(snapshot_id))

    def ids(self) -> list[str]:
        """Return the ids of all snapshots, sorted."""
        return sorted(os.listdir(self._directory))

    def publish(self, snapshot_id: str, tree: bytes, facts: SnapshotFacts, parent: str | None) -> None:
        """Write a record durably; `AlreadyExists` when the id is taken."""
        body = json.dumps({"version": 1, "tree": tree.hex(), "parent": parent, **asdict(facts)}).encode()
        whole = body + b"\n" + digest(body).hex().encode() + b"\n"
        try:
            write_file(self._path(snapshot_id), whole, durable=True, replace=False, temporary=self._temporary)
        except FileExistsError:
            raise AlreadyExists("a snapshot with this id exists", field="snapshot_id") from None

    def read(self, snapshot_id: str) -> tuple[bytes, SnapshotFacts]:
        """Return the tree and the facts of a snapshot; `NotFound`, or `SnapshotDamaged` when the record is damaged."""
        try:
            with open(self._path(snapshot_id), "rb") as file:
                body, _, check = file.read(_LARGEST).partition(b"\n")
        except FileNotFoundError:
            raise NotFound(f"there is no snapshot {snapshot_id!r}", field="snapshot_id") from None
        if check.strip() != digest(body).hex().encode():
            raise SnapshotDamaged(f"the record of snapshot {snapshot_id} is damaged", object=snapshot_id)
        value = json.loads(body)
        facts = SnapshotFacts(value["bytes"], value["files"], value["new_bytes"], value["skipped"])
        return bytes.fromhex(value["tree"]), facts

    def remove(self, snapshot_id: str) -> None:
        """Remove a record if it exists."""
        with suppress(FileNotFoundError):
            os.unlink(self._path(snapshot_id))
            sync_directory(self._directory)
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(self._damaged, snapshot_id))

    def damaged_since(self, snapshot_id: str, newest_ns: int) -> int:
        """Return since when a snapshot is known to be damaged. At the first call that is `newest_ns`, when the newest
        object was written: the snapshot may need any older object.
        """
        path = os.path.join(self._damaged, snapshot_id)
        try:
            return os.stat(path).st_mtime_ns
        except FileNotFoundError:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.utime(fd, ns=(newest_ns, newest_ns))
                os.fsync(fd)
            finally:
                os.close(fd)
            sync_directory(self._damaged)
            return newest_ns
