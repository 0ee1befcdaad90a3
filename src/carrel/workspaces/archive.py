"""The archive stores snapshots where any node can restore them, whichever driver took them.

A snapshot is a manifest that names bundles of content-addressed objects; a later snapshot adds only objects that the
volume's last one lacks. Nodes need not know each other. A node that will refer to bundles first writes an intent, then
checks whether a note announces their removal. A node that will remove bundles first writes a note, then checks for
intents. So at least one of two such nodes sees the other.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TypeVar

import zstandard

from carrel.errors import ArchiveUnavailable, NotFound, PlatformError, SnapshotDamaged
from carrel.primitives.keyed_lock import KeyedThreadLocks
from carrel.workspaces.archive_bundles import ArchiveCache, BundleBatch, Index, Outbox, file_digest
from carrel.workspaces.layout import CANONICAL_UID
from carrel.workspaces.manifests import (
    Bundle,
    Intent,
    Manifest,
    Note,
    StoredAttachment,
    pack,
    split_bundle_name,
    unpack,
    worth_rewriting,
)
from carrel.workspaces.remote import Remote, RemoteEntry
from carrel.workspaces.volumes.base import Collected, VolumeDriver, check_name
from carrel.workspaces.volumes.directory import failing, opened
from carrel.workspaces.volumes.exporting import Exported
from carrel.workspaces.volumes.objects import ObjectStore, Reader, damaged, digest, inflate
from carrel.workspaces.volumes.rebuild import rebuild

_AT_ONCE = 4
_LOOKED_AT = 4
_STALE_S = 24 * 3600.0
"""The process that wrote an intent or a note this old is dead: a live one finishes in less than half of this time."""

_CLOCK_STEP_S = 1.0
"""Buckets report times in whole seconds."""

T = TypeVar("T")
R = TypeVar("R")
_Held = dict[str, tuple[Bundle, Index]]


@dataclass(frozen=True, slots=True)
class Archived:
    """The result of storing a snapshot: the bytes sent, and the number of bundles that hold it."""

    bytes: int
    bundles: int


class Archive:
    """The snapshots in one remote. Threads, processes and nodes may use it at the same time.

    Every method raises `ArchiveUnavailable` when the remote cannot be reached; its content is then unchanged.
    """

    def __init__(self, remote: Remote, cache_dir: str):
        self._remote = remote
        with failing("cannot use the archive's cache"):
            self._cache = ArchiveCache(cache_dir)
        self._locks = KeyedThreadLocks()

    def store(
        self,
        volume: str,
        snapshot_id: str,
        driver: VolumeDriver,
        *,
        origin: str | None = None,
        attachment: bytes = b"",
    ) -> Archived:
        """Store a snapshot of the driver, unless the archive has it already.

        `origin` is the volume that this one was forked from: its archived objects are not sent again. `attachment` is
        stored with the snapshot. A crash at any point leaves no incomplete snapshot.
        """
        name = _manifest_name(volume, snapshot_id)
        with self._locks.hold(volume), failing("cannot archive the snapshot"):
            with suppress(NotFound, SnapshotDamaged):
                return Archived(0, len(self._manifest(volume, snapshot_id).bundles))
            started = time.monotonic()
            held = self._held(volume, origin)
            with self._intending(volume, held) as prefix:
                exported, sent = self._send(prefix, volume, snapshot_id, driver, held, attachment)
                used = _choose(exported.needed | ({digest(attachment)} if attachment else set()), held | sent)
                manifest = Manifest(
                    volume=volume,
                    snapshot_id=snapshot_id,
                    tree=exported.tree.hex(),
                    size=exported.size,
                    files=exported.files,
                    created_at=time.time(),
                    bundles=tuple(used),
                    attachment=_place(attachment, used, held | sent) if attachment else None,
                )
                if time.monotonic() - started > _STALE_S / 2:
                    raise ArchiveUnavailable("storing took so long that the intent may be ignored", hint="try again")
                self._remote.put(name, pack(manifest))
            self._cache.keep_known(volume, exported.known)
            return Archived(sum(bundle.size for bundle, _ in sent.values()), len(used))

    @contextmanager
    def _intending(self, volume: str, held: _Held) -> Iterator[str]:
        """Announce that the bundles in `held` are about to be needed, and new ones that start with the yielded prefix.

        Removes bundles from `held` that are gone or about to be removed.
        """
        token = secrets.token_hex(8)
        prefix = f"bundles/{volume}/{token}"
        intent = f"intents/{token}"
        self._remote.put(intent, pack(Intent(prefix, frozenset(held))))
        for name in self._lost([bundle for bundle, _ in held.values()]):
            del held[name]
        try:
            yield prefix
        except ArchiveUnavailable:
            raise  # the intent stays: the manifest may still arrive
        except BaseException:
            with suppress(ArchiveUnavailable):
                self._remote.delete([intent])
            raise
        with suppress(ArchiveUnavailable):
            self._remote.delete([intent])

    def _held(self, volume: str, origin: str | None) -> _Held:
        """Return the bundles that a new snapshot may refer to."""
        manifests = self._newest(volume)[-1:]
        if not manifests and origin is not None:
            manifests = self._newest(check_name(origin, "origin"))
        rewritten = worth_rewriting(manifests[-1].bundles) if manifests else set()
        wanted = {bundle.name: bundle for manifest in manifests for bundle in manifest.bundles}
        wanted = {name: wanted[name] for name in wanted if name not in rewritten and not self._cache.distrusts(name)}

        def index(bundle: Bundle) -> Index | None:
            try:
                return self._cache.index(bundle, self._remote)
            except NotFound:
                return None

        found = _at_once(index, wanted.values())
        return {bundle.name: (bundle, each) for bundle, each in found if each is not None}

    def _newest(self, volume: str) -> list[Manifest]:
        """Return the last few snapshots of a volume, the newest last."""
        found = []
        for entry in self._listed(volume)[-_LOOKED_AT:]:
            with suppress(NotFound, SnapshotDamaged):
                found.append(self._read_manifest(entry.name))
        return sorted(found, key=lambda manifest: manifest.created_at)

    def _send(
        self, prefix: str, volume: str, snapshot_id: str, driver: VolumeDriver, held: _Held, attachment: bytes
    ) -> tuple[Exported, _Held]:
        archived: set[bytes] = set().union(*(index for _, index in held.values()))
        with self._cache.working() as place:
            outbox = Outbox(place, self._remote, prefix, archived)
            try:
                with BundleBatch(outbox) as batch:
                    exported = driver.export_objects(snapshot_id, outbox, batch, self._cache.known(volume))
                    if attachment:
                        batch.put(attachment)
                    batch.finish()
                sent = {bundle.name: (bundle, index) for bundle, index in outbox.sent()}
            finally:
                outbox.close()
        for bundle, index in sent.values():
            self._cache.keep_index(bundle, index)
        return exported, sent

    def _lost(self, wanted: Sequence[Bundle]) -> set[str]:
        """Return the bundles that are gone or about to be removed.

        Reads notes before the listing: a note that disappears in between has had its effect.
        """
        condemned: set[str] = set()
        for note in self._remote.list("collecting"):
            with suppress(NotFound):
                condemned |= unpack(Note, self._remote.get(note), note).bundles
        there: dict[str, int] = {}
        for owner in {split_bundle_name(bundle.name)[0] for bundle in wanted}:
            there.update((entry.name, entry.size) for entry in self._remote.entries(f"bundles/{owner}"))
        return {each.name for each in wanted if each.name in condemned or there.get(each.name) != each.size}

    def fetch(self, volume: str, snapshot_id: str, directory: str) -> None:
        """Write a snapshot's files into an empty directory that nothing uses.

        `NotFound` when the archive does not have it; `SnapshotDamaged` names the damaged object and bundle.
        """
        manifest = self._manifest(volume, snapshot_id)
        owner = CANONICAL_UID if os.geteuid() == 0 else None
        with (
            failing("cannot write the snapshot's files"),
            self._gathered(manifest) as found,
            Reader(found.store) as reader,
            opened(directory) as root,
            found.blaming(),
        ):
            known = rebuild(found.store, reader, bytes.fromhex(manifest.tree), root, owner)
        self._cache.keep_known(volume, known)

    def attachment(self, volume: str, snapshot_id: str) -> bytes:
        """Return the attachment of a snapshot; raises what `fetch` raises."""
        where = self._manifest(volume, snapshot_id).attachment
        if where is None:
            return b""
        offset, stored, codec, length = where.spot
        try:
            data = inflate(codec, self._remote.get_range(where.bundle, offset, stored), length)
        except NotFound:
            raise _at_fault(where.key, where.bundle, "is missing") from None
        except (ValueError, zstandard.ZstdError):
            data = b""
        if digest(data).hex() != where.key:
            raise _at_fault(where.key, where.bundle, "is damaged")
        return data

    def snapshots(self, volume: str) -> list[str]:
        """Return the ids of a volume's snapshots, in the order they were stored."""
        return [entry.name.rpartition("/")[2] for entry in self._listed(volume)]

    def delete(self, volume: str, snapshot_id: str) -> None:
        """Remove a snapshot if it exists. `collect` removes the bundles that only it needed."""
        self._remote.delete([_manifest_name(volume, snapshot_id)])

    def forget(self, volume: str) -> None:
        """Remove everything of a volume except bundles that snapshots of other volumes need."""
        with self._locks.hold(volume), failing("cannot forget the volume"):
            self._remote.delete([entry.name for entry in self._listed(volume)])
            self._cache.forget(volume)
        self._collect(f"bundles/{volume}")

    def collect(self) -> Collected:
        """Remove bundles that no snapshot needs, while others store and fetch.

        Bundles of a killed process are removed a day later. `damaged` names unreadable manifests; bundles older than
        such a manifest are kept, because it may need them.
        """
        collected = self._collect("bundles")
        with failing("cannot tidy the archive's cache"):
            self._cache.prune(set(self._remote.list("bundles")))
        return collected

    def _collect(self, prefix: str) -> Collected:
        started = time.monotonic()
        note = f"collecting/{secrets.token_hex(16)}"
        self._remote.put(note, pack(Note(frozenset())))
        try:
            now = next((each.modified for each in self._remote.entries("collecting") if each.name == note), time.time())
            self._remove_stale(now)
            doomed, damaged = self._unneeded(list(self._remote.entries(prefix)))
            if doomed:
                self._remote.put(note, pack(Note(frozenset(each.name for each in doomed))))
                doomed, damaged = self._unneeded(doomed)
        except SnapshotDamaged:
            self._remote.delete([note])
            raise
        if time.monotonic() - started > _STALE_S / 2:
            raise ArchiveUnavailable("the archive answered too late to remove anything", hint="try again")
        # If this fails, the note stays, because the removal may still happen.
        self._remote.delete(each.name for each in doomed)
        self._remote.delete([note])
        return Collected(len(doomed), sum(each.size for each in doomed), tuple(damaged))

    def _remove_stale(self, now: float) -> None:
        for prefix in ("intents", "collecting"):
            self._remote.delete([e.name for e in self._remote.entries(prefix) if e.modified < now - _STALE_S])

    def _unneeded(self, bundles: list[RemoteEntry]) -> tuple[list[RemoteEntry], list[str]]:
        """Return the bundles that no manifest or intent names, and the unreadable manifests.

        Reads intents first: the manifest of one that disappears in between is there.
        """
        needed: set[str] = set()
        prefixes: list[str] = []
        for name in self._remote.list("intents"):
            with suppress(NotFound):
                intent = unpack(Intent, self._remote.get(name), name)
                needed |= intent.bundles
                prefixes.append(intent.prefix)

        def names(entry: RemoteEntry) -> set[str] | None:
            try:
                return {bundle.name for bundle in self._read_manifest(entry.name).bundles}
            except NotFound:
                return set()
            except SnapshotDamaged:
                return None

        since = -1.0
        damaged = []
        for entry, found in _at_once(names, self._remote.entries("manifests")):
            if found is None:
                damaged.append(entry.name)
                since = max(since, entry.modified + _CLOCK_STEP_S)
            else:
                needed |= found
        unneeded = [each for each in bundles if each.name not in needed and each.modified > since]
        return [each for each in unneeded if not each.name.startswith(tuple(prefixes))], damaged

    @contextmanager
    def _gathered(self, manifest: Manifest) -> Iterator[_Gathered]:
        """Download the bundles of a snapshot into a temporary object store."""
        with self._cache.working() as place:
            store = ObjectStore(place)
            store.prepare()

            def get(bundle: Bundle) -> str:
                path = os.path.join(place, "packs", split_bundle_name(bundle.name)[1] + ".pack")
                try:
                    self._remote.get_file(bundle.name, path)
                except NotFound:
                    return "is missing"
                size = os.stat(path).st_size
                if size != bundle.size:
                    return f"has {size} of {bundle.size} bytes"
                return "" if file_digest(path) == bundle.digest else "is damaged"

            faults = {bundle.name: fault for bundle, fault in _at_once(get, manifest.bundles) if fault}
            for name in faults:
                self._cache.mark_damaged(name)
            store.refresh()
            yield _Gathered(store, faults, {split_bundle_name(b.name)[1] + ".pack": b.name for b in manifest.bundles})

    def _listed(self, volume: str) -> list[RemoteEntry]:
        found = self._remote.entries(f"manifests/{check_name(volume, 'volume')}")
        return sorted(found, key=lambda entry: (entry.modified, entry.name))

    def _manifest(self, volume: str, snapshot_id: str) -> Manifest:
        try:
            return self._read_manifest(_manifest_name(volume, snapshot_id))
        except NotFound:
            raise NotFound(f"the archive has no snapshot {snapshot_id!r}", field="snapshot_id") from None

    def _read_manifest(self, name: str) -> Manifest:
        manifest = unpack(Manifest, self._remote.get(name), name)
        if _manifest_name(manifest.volume, manifest.snapshot_id) != name:
            raise SnapshotDamaged(f"the archive's manifest {name} belongs to another snapshot", object=name)
        return manifest


@dataclass(frozen=True, slots=True)
class _Gathered:
    store: ObjectStore
    faults: dict[str, str]
    names: dict[str, str]

    @contextmanager
    def blaming(self) -> Iterator[None]:
        """Let errors name the bundle as well."""
        try:
            yield
        except SnapshotDamaged as error:
            raise self._blame(error) from None

    def _blame(self, error: SnapshotDamaged) -> SnapshotDamaged:
        key = error.extra.get("object")
        place = self.store.place(bytes.fromhex(key)) if isinstance(key, str) else None
        guilty = {self.names[place[0]]} if place is not None else set(self.faults)
        faults = [f"bundle {name} {self.faults.get(name, 'is damaged')}" for name in sorted(guilty)]
        return SnapshotDamaged(
            "; ".join([error.detail, *faults]), hint="restore another snapshot", object=key, bundles=sorted(guilty)
        )


def _manifest_name(volume: str, snapshot_id: str) -> str:
    return f"manifests/{check_name(volume, 'volume')}/{check_name(snapshot_id, 'snapshot_id')}"


def _choose(needed: set[bytes], held: _Held) -> list[Bundle]:
    """Choose bundles that together have every object."""
    rest = set(needed)
    used = []
    for bundle, index in held.values():
        if mine := rest & index.keys():
            rest -= mine
            used.append(replace(bundle, live=sum(index[key][1] for key in mine)))
    if rest:
        raise PlatformError(f"{len(rest)} objects of the snapshot did not get into the archive")
    return used


def _place(attachment: bytes, used: list[Bundle], held: _Held) -> StoredAttachment:
    key = digest(attachment)
    bundle = next(bundle for bundle in used if key in held[bundle.name][1])
    return StoredAttachment(key.hex(), bundle.name, held[bundle.name][1][key])


def _at_fault(key: str, bundle: str, how: str) -> SnapshotDamaged:
    error = damaged(bytes.fromhex(key), "cannot be read")
    return SnapshotDamaged(f"{error.detail}; bundle {bundle} {how}", hint=error.hint, object=key, bundles=[bundle])


def _at_once(work: Callable[[T], R], items: Iterable[T]) -> list[tuple[T, R]]:
    wanted = list(items)
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="carrel-archive") as pool:
        return list(zip(wanted, pool.map(work, wanted), strict=True))
