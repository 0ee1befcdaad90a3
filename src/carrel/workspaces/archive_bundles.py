"""Sends new objects to the archive in bundles, and caches what this node knows of archived bundles.

A bundle is a pack of an object store. It is sent as soon as it is full; only its index stays on this node.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import BoundedSemaphore

import msgpack
from blake3 import blake3

from carrel.errors import SnapshotDamaged
from carrel.primitives.atomic import write_file
from carrel.primitives.trees import remove_tree
from carrel.workspaces.manifests import Bundle, split_bundle_name
from carrel.workspaces.remote import Remote
from carrel.workspaces.volumes.capture import Known, pack_known, unpack_known
from carrel.workspaces.volumes.objects import Batch, ObjectStore, Spot, digest, read_index

Index = dict[bytes, Spot]

_UPLOADS_AT_ONCE = 2
_PACKS_WAITING = 4
_PIECE = 4 << 20


def file_digest(path: str) -> str:
    """Return the check sum of a file."""
    hasher = blake3()
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            hasher.update(piece)
    return hasher.hexdigest()


class Outbox(ObjectStore):
    """An object store whose packs go to the remote, under names that start with `prefix`.

    Objects in `archived` count as stored.
    """

    def __init__(self, directory: str, remote: Remote, prefix: str, archived: Set[bytes]):
        super().__init__(directory)
        self._remote = remote
        self._prefix = prefix
        self._archived = archived
        self._pool = ThreadPoolExecutor(_UPLOADS_AT_ONCE, thread_name_prefix="carrel-archive")
        self._slots = BoundedSemaphore(_PACKS_WAITING)
        self._jobs: list[Future[tuple[Bundle, Index]]] = []
        self.prepare()

    def has(self, key: bytes, length: int) -> bool:
        """Return whether the archive has the object."""
        return key in self._archived

    def refresh(self) -> None:
        """Do nothing: no other process adds packs here."""

    def sync_packs(self) -> None:
        """Do nothing: packs are sent, not kept."""

    def publish(self, aside: str, name: str) -> None:
        """Send a finished pack in the background. Waits while several are being sent; raises when one has failed."""
        for job in self._jobs:
            if job.done():
                job.result()
        self._slots.acquire()
        job = self._pool.submit(self._send, aside)
        job.add_done_callback(lambda _: self._slots.release())
        self._jobs.append(job)

    def _send(self, path: str) -> tuple[Bundle, Index]:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            index = read_index(lambda start, length: os.pread(file.fileno(), length, start), size)
        if index is None:
            raise SnapshotDamaged("a bundle was damaged before it was sent", hint="check the disk of this server")
        stored = sum(spot[1] for spot in index.values())
        name = self._prefix + secrets.token_hex(8)
        bundle = Bundle(name, size, file_digest(path), stored, stored)
        self._remote.put_file(name, path)
        os.unlink(path)
        return bundle, index

    def sent(self) -> list[tuple[Bundle, Index]]:
        """Wait until everything is sent."""
        return [job.result() for job in self._jobs]

    def close(self) -> None:
        """Wait for the running uploads and drop the rest."""
        self._pool.shutdown(cancel_futures=True)


class BundleBatch(Batch):
    """Objects for bundles: objects of any size are packed."""

    def add(self, key: bytes, data: bytes, *, packed: bool = False) -> None:
        """Store content whose name is known."""
        super().add(key, data, packed=True)


class ArchiveCache:
    """Saves this node work: indexes of bundles, and the facts of exported volumes. May be removed at any time."""

    def __init__(self, directory: str):
        self._volumes = os.path.join(directory, "volumes")
        self._work = os.path.join(directory, "work")
        self._lock = os.path.join(directory, "lock")
        for path in (directory, self._volumes, self._work):
            os.makedirs(path, 0o700, exist_ok=True)

    @contextmanager
    def working(self) -> Iterator[str]:
        """Yield an empty directory for one operation. Removes those of killed processes first."""
        with open(self._lock, "ab") as guard:
            fcntl.flock(guard, fcntl.LOCK_EX)
            for name in os.listdir(self._work):
                self._remove_abandoned(os.path.join(self._work, name))
            path = os.path.join(self._work, secrets.token_hex(16))
            os.mkdir(path, 0o700)
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            yield path
        finally:
            remove_tree(path)
            os.close(fd)

    @staticmethod
    def _remove_abandoned(path: str) -> None:
        with suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            finally:
                os.close(fd)
            remove_tree(path)

    def known(self, volume: str) -> Known:
        """Return the facts from the last export of a volume."""
        try:
            with open(os.path.join(self._volumes, volume, "known"), "rb") as file:
                return unpack_known(file.read())[0]
        except FileNotFoundError:
            return {}

    def keep_known(self, volume: str, known: Known) -> None:
        """Store the facts from an export."""
        self._keep(volume, "known", pack_known(known, ""))

    def index(self, bundle: Bundle, remote: Remote) -> Index | None:
        """Return the index of a bundle, from the cache or from the end of the bundle; None when the bundle is damaged.

        `NotFound` when the bundle is gone.
        """
        volume, token = split_bundle_name(bundle.name)
        try:
            with open(os.path.join(self._volumes, volume, token), "rb") as file:
                raw = file.read()
            if digest(raw[32:]) == raw[:32]:
                return dict(msgpack.unpackb(raw[32:], use_list=False))
        except FileNotFoundError:
            pass
        index = read_index(lambda start, length: remote.get_range(bundle.name, start, length), bundle.size)
        if index is not None:
            self.keep_index(bundle, index)
        return index

    def keep_index(self, bundle: Bundle, index: Index) -> None:
        """Store the index of a bundle."""
        volume, token = split_bundle_name(bundle.name)
        body: bytes = msgpack.packb(list(index.items()))
        self._keep(volume, token, digest(body) + body)

    def mark_damaged(self, name: str) -> None:
        """Mark a bundle as damaged, so that its objects are sent again."""
        volume, token = split_bundle_name(name)
        self._keep(volume, f"bad-{token}", b"")

    def distrusts(self, name: str) -> bool:
        """Return whether the bundle is marked as damaged."""
        volume, token = split_bundle_name(name)
        return os.path.exists(os.path.join(self._volumes, volume, f"bad-{token}"))

    def prune(self, bundles: set[str]) -> None:
        """Remove the entries of bundles that are not in `bundles`."""
        there: dict[str, set[str]] = {}
        for name in bundles:
            with suppress(ValueError):  # not a bundle of carrel
                volume, token = split_bundle_name(name)
                there.setdefault(volume, {"known"}).update((token, f"bad-{token}"))
        for volume in os.listdir(self._volumes):
            folder = os.path.join(self._volumes, volume)
            for name in os.listdir(folder):
                if name not in there.get(volume, {"known"}):
                    with suppress(FileNotFoundError):
                        os.unlink(os.path.join(folder, name))

    def forget(self, volume: str) -> None:
        """Remove everything about a volume."""
        remove_tree(os.path.join(self._volumes, volume))

    def _keep(self, volume: str, name: str, data: bytes) -> None:
        folder = os.path.join(self._volumes, volume)
        with suppress(OSError), self.working() as place:  # without the entry the next operation only takes longer
            os.makedirs(folder, 0o700, exist_ok=True)
            write_file(os.path.join(folder, name), data, temporary=place)
