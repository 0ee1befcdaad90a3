"""The files of contexts: provided to a sandbox, kept as snapshots, archived, brought back, deleted.

Binds the volume driver and the archive to the records. Knows nothing of sandboxes: who calls sees to it that none uses
a workspace whose files are replaced.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from weakref import WeakValueDictionary

from carrel.control.stored import StoredSnapshots
from carrel.errors import ArchiveUnavailable, CarrelError, Conflict, NotFound, PlatformError, SnapshotDamaged
from carrel.metrics import OK, Metrics, outcome_of
from carrel.models import State, WorkspaceUsage
from carrel.store import SessionRecord
from carrel.store.snapshots import SnapshotRecord, SnapshotStatus, SnapshotStore
from carrel.workspaces.archive import Archive
from carrel.workspaces.layout import Layout, decode, encode
from carrel.workspaces.volumes import VolumeDriver, VolumeUsage

log = logging.getLogger("carrel.workspaces")

AUTOMATIC = frozenset({"checkpoint", "stop", "fork"})
"""Why a snapshot that nobody asked for was taken."""
KEPT = 3
"""How many of those stay."""
MB = 1024 * 1024


Sync = Callable[[SessionRecord, str], Awaitable[None]]
"""Bring the filespace and the workspace of a session together, one way; the second is the workspace's path."""


@dataclass(frozen=True, slots=True)
class Provided:
    """A workspace that is ready for a sandbox."""

    path: str
    new: bool = False
    notice: str | None = None


@dataclass(slots=True)
class Base:
    """How the filespace takes part: what it knew of a workspace travels with the snapshots of it."""

    get: Callable[[str], Awaitable[bytes]]
    set: Callable[[str, bytes], Awaitable[None]]
    forget: Callable[[str], Awaitable[None]]


async def _no_bytes(_context: str) -> bytes:
    return b""


async def _ignore(_context: str, _base: bytes) -> None:
    return


async def _forget(_context: str) -> None:
    return


@dataclass(slots=True)
class _Locks:
    known: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    def get(self, context: str) -> asyncio.Lock:
        lock = self.known.get(context)
        if lock is None:
            lock = self.known[context] = asyncio.Lock()
        return lock


class Workspaces:
    """The workspaces of one server."""

    def __init__(
        self,
        layout: Layout,
        driver: VolumeDriver,
        store: SnapshotStore,
        archive: Archive,
        node: str,
        *,
        ttl_days: float = 7.0,
        metrics: Metrics | None = None,
    ):
        self._layout = layout
        self._store = store
        self._archive = archive
        self._ttl_days = ttl_days
        self._locks = _Locks()
        self._bases = os.path.join(layout.cache, "bases")
        self._origins = os.path.join(layout.cache, "origins")
        self.stored = StoredSnapshots(driver, archive, layout.cache)
        self.driver = driver
        self.node = node
        self.metrics = metrics or Metrics()
        self.base = Base(_no_bytes, _ignore, _forget)

    def volume(self, record: SessionRecord) -> str:
        """The name of the volume of a session."""
        return encode(record.context_id or record.id, ephemeral=record.ephemeral)

    def path(self, record: SessionRecord) -> str:
        """Where the workspace of a session lies."""
        return self.driver.path(self.volume(record))

    @asynccontextmanager
    async def still(self, context: str) -> AsyncIterator[None]:
        """Neither a sync nor a snapshot of this context happens meanwhile: each sees the other whole or not at all."""
        async with self._locks.get(context):
            yield

    # for a sandbox

    async def provide(self, record: SessionRecord, previous: SessionRecord | None) -> Provided:
        """The workspace for a sandbox that is about to start: as it lies here, brought back when it is lost, or new.

        `previous` is what was recorded of the context last, on this server.
        """
        volume = self.volume(record)
        if await asyncio.to_thread(self.driver.exists, volume):
            return Provided(await asyncio.to_thread(self._reopen, record, volume))
        if previous is not None and record.context_id is not None:
            snapshots = await self._store.all_ready(record.context_id)
            if snapshots:
                return await self._bring(record, snapshots)
        return Provided(await asyncio.to_thread(self._create, record, volume), new=True)

    async def move(self, record: SessionRecord, previous: SessionRecord, *, silent: bool) -> Provided:
        """The workspace of a context that was on another server, from the newest snapshot.

        `silent` says that the other server fell silent: what it had not archived has to be done without. What lies here
        of an earlier time is replaced.
        """
        snapshots = await self._store.all_ready(_context(record))
        kept = previous.snapshot is not None or previous.state is State.ERROR
        if not silent and (not self._reachable(snapshots[0]) if snapshots else kept):
            raise Conflict(
                f"the newest files of this context are on server '{previous.node}' and not in the archive yet",
                field="context_id",
                hint="ask that server, wait until it has archived them, or restore an older snapshot",
                node=previous.node,
            )
        if any(self._reachable(snapshot) for snapshot in snapshots):
            return await self._bring(record, snapshots)
        await self.discard(record)
        path = await asyncio.to_thread(self._create, record, self.volume(record))
        words = f"server '{previous.node}' fell silent before it had archived anything of this workspace"
        return Provided(path, new=True, notice=words if silent else None)

    def _reachable(self, snapshot: SnapshotRecord) -> bool:
        return snapshot.archived or snapshot.node in {None, self.node}

    def _create(self, record: SessionRecord, volume: str) -> str:
        self.driver.create(volume, cap_bytes(record))
        path = self.driver.path(volume)
        try:
            self._furnish(record, path, new=True)
        except BaseException:
            self.driver.delete_volume(volume)
            raise
        return path

    def _reopen(self, record: SessionRecord, volume: str) -> str:
        cap = cap_bytes(record)
        if self.driver.cap(volume) != cap:
            self.driver.set_cap(volume, cap)
        path = self.driver.path(volume)
        self._furnish(record, path, new=False)
        return path

    def _furnish(self, record: SessionRecord, path: str, *, new: bool) -> None:
        used = 0
        if not new and self.driver.kernel_quota:
            used = self.driver.usage(os.path.basename(path)).bytes
        name = record.context_id or record.id
        self._layout.furnish(
            path, name, ephemeral=record.ephemeral, new=new, ttl_days=self._ttl_days, used=used
        )  # fmt: skip

    async def _bring(self, record: SessionRecord, snapshots: list[SnapshotRecord]) -> Provided:
        """Restore the newest snapshot that is whole, and say what was passed over."""
        volume = self.volume(record)
        new = not await asyncio.to_thread(self.driver.exists, volume)
        if new:
            await asyncio.to_thread(self._create, record, volume)
        passed: list[str] = []
        try:
            for snapshot in snapshots:
                if not self._reachable(snapshot):
                    passed.append(f"snapshot {snapshot.id} was not archived by server '{snapshot.node}'")
                    continue
                try:
                    await self._restore(volume, snapshot)
                except (SnapshotDamaged, NotFound) as error:
                    log.warning("snapshot %s cannot be used: %s", snapshot.id, error)
                    passed.append(f"snapshot {snapshot.id}: {error.detail}")
                    continue
                await self.base.set(snapshot.context_id, await self._base_of(volume, snapshot))
                notice = f"restored from the last good snapshot {snapshot.id}; {'; '.join(passed)}"[:2000]
                path = await asyncio.to_thread(self._reopen, record, volume)
                return Provided(path, new, notice if passed else None)
            raise SnapshotDamaged(
                f"no snapshot of this context can be restored: {'; '.join(passed)}"[:2000],
                hint="terminate the session to begin with an empty workspace",
            )
        except BaseException:
            if new:
                await asyncio.to_thread(self.driver.delete_volume, volume)
            raise

    async def _restore(self, volume: str, snapshot: SnapshotRecord) -> None:
        began = time.monotonic()
        await asyncio.to_thread(self.stored.restore, snapshot, volume)
        self.metrics.restored(time.monotonic() - began)

    async def restore(self, record: SessionRecord, snapshot: SnapshotRecord) -> None:
        """Replace the files of a workspace by a snapshot's. What the filespace knows stays: it sees them as changes."""
        volume = self.volume(record)
        if not await asyncio.to_thread(self.driver.exists, volume):
            await asyncio.to_thread(self._create, record, volume)
        await self._restore(volume, snapshot)

    async def fork(self, snapshot: SnapshotRecord, context: str, cap: int | None) -> None:
        """A new workspace with a snapshot's files, for a context that has none."""
        source, target = encode(snapshot.context_id, ephemeral=False), encode(context, ephemeral=False)
        await asyncio.to_thread(self.stored.fork, snapshot, target, cap)
        await asyncio.to_thread(_write, os.path.join(self._origins, target), source.encode())

    async def exists(self, context: str) -> bool:
        """Whether there are files of a context here."""
        return await asyncio.to_thread(self.driver.exists, encode(context, ephemeral=False))

    async def discard(self, record: SessionRecord) -> None:
        """Delete the files of a workspace, not its snapshots."""
        await asyncio.to_thread(self.driver.delete_volume, self.volume(record))

    async def usage(self, record: SessionRecord) -> VolumeUsage:
        """What a workspace holds."""
        return await asyncio.to_thread(self.driver.usage, self.volume(record))

    async def report_usage(self, record: SessionRecord) -> WorkspaceUsage:
        """The same against its cap, as the API shows it."""
        return WorkspaceUsage(
            context_id=record.context_id,
            bytes=(await self.usage(record)).bytes,
            limit_bytes=cap_bytes(record),
            measured_at=datetime.now(UTC),
            enforced_by="kernel" if self.driver.kernel_quota else "watch",
        )

    # keeping

    async def take(self, record: SessionRecord, reason: str) -> SnapshotRecord:
        """Take a snapshot on this server; a sandbox may go on writing meanwhile."""
        context = _context(record)
        async with self.still(context):
            last = await self._store.newest_ready(context)
            parent = last.id if last else None
            name = f"snap-{secrets.token_hex(8)}"
            made = SnapshotRecord(
                name, context, self.driver.name, time.time(),
                session_id=record.id, parent=parent, node=self.node, reason=reason,
            )  # fmt: skip
            await self._store.insert(made)
            began = time.monotonic()
            outcome = OK
            try:
                if base := await self.base.get(context):
                    await asyncio.to_thread(_write, os.path.join(self._bases, name), base)
                facts = await asyncio.to_thread(self.driver.snapshot, self.volume(record), name, parent)
            except BaseException as error:
                outcome = outcome_of(error)
                words = error.detail if isinstance(error, CarrelError) else "it was broken off"
                await self._store.failed(name, words[:2000])
                raise
            finally:
                self.metrics.snapshotted(self.driver.name, outcome, time.monotonic() - began)
            await self._store.ready(name, size=facts.bytes, new_bytes=facts.new_bytes, files=facts.files)
        return replace(
            made, status=SnapshotStatus.READY, bytes=facts.bytes, new_bytes=facts.new_bytes, files=facts.files
        )

    async def archive(self, snapshot: SnapshotRecord) -> None:
        """Put a snapshot of this server into the archive; `ArchiveUnavailable` when it cannot be reached."""
        volume = encode(snapshot.context_id, ephemeral=False)
        base = await asyncio.to_thread(_read, os.path.join(self._bases, snapshot.id))
        origin = (await asyncio.to_thread(_read, os.path.join(self._origins, volume))).decode() or None
        began = time.monotonic()
        outcome, sent = OK, 0
        try:
            done = await asyncio.to_thread(
                self._archive.store, volume, snapshot.id, self.driver, origin=origin, attachment=base
            )
            sent = done.bytes
        except BaseException as error:
            outcome = outcome_of(error)
            raise
        finally:
            self.metrics.archived(outcome, time.monotonic() - began, sent)
        await self._store.mark_archived(snapshot.id)
        await asyncio.to_thread(_unlink, os.path.join(self._bases, snapshot.id))
        if origin is not None:  # from now on its own snapshots are what new ones build on
            await asyncio.to_thread(_unlink, os.path.join(self._origins, volume))

    async def settle(self, snapshot: SnapshotRecord) -> str | None:
        """Archive a snapshot and drop old ones; what the session has to say when that cannot be done now."""
        notice = None
        try:
            await self.archive(snapshot)
        except CarrelError as error:
            log.warning("snapshot %s could not be archived: %s", snapshot.id, error)
            notice = archive_notice(error)
        try:
            await self.prune(snapshot.context_id)
        except CarrelError as error:
            log.warning("old snapshots of %s could not be deleted: %s", snapshot.context_id, error)
        return notice

    async def keep(self, record: SessionRecord, push: Sync) -> tuple[str | None, str | None, str | None]:
        """Push, snapshot, archive: the newest snapshot, what the session says of itself, and what went wrong."""
        failure: str | None = None
        if record.filespace:
            try:
                await push(record, self.path(record))
            except CarrelError as error:
                failure = f"the filespace could not be synced: {error.detail}"[:2000]
        try:
            taken = await self.take(record, "stop")
        except CarrelError as error:
            log.warning("no snapshot of %s: %s", record.context_id, error)
            return record.snapshot, record.notice, f"no snapshot could be taken: {error.detail}"[:2000]
        return taken.id, await self.settle(taken), failure

    async def catch_up(self) -> dict[str, str | None]:
        """Archive what could not be archived before; for each context what is wrong still, or None."""
        said: dict[str, str | None] = {}
        for snapshot in await self._store.unarchived(self.node):
            try:
                await self.archive(snapshot)
                said[snapshot.context_id] = None
            except NotFound:  # pruned or deleted meanwhile
                continue
            except ArchiveUnavailable as error:
                said[snapshot.context_id] = archive_notice(error)
                break  # the others would wait in vain
            except CarrelError as error:
                log.warning("snapshot %s cannot be archived: %s", snapshot.id, error)
                said[snapshot.context_id] = archive_notice(error)
        return said

    async def prune(self, context: str) -> bool:
        """Delete the older of the snapshots that nobody asked for; says whether any was deleted."""
        ready = await self._store.all_ready(context)
        automatic = [snapshot for snapshot in ready if snapshot.reason in AUTOMATIC]
        safe = next((snapshot.id for snapshot in ready if snapshot.archived), None)
        doomed = [snapshot for snapshot in automatic[KEPT:] if snapshot.id != safe]
        for snapshot in doomed:
            try:
                await self.drop(snapshot)
            except ArchiveUnavailable:
                return False  # it is tried again when the next one is taken
        return bool(doomed)

    async def drop(self, snapshot: SnapshotRecord) -> None:
        """Delete a snapshot for good, here and in the archive."""
        volume = encode(snapshot.context_id, ephemeral=False)
        if snapshot.archived:
            await asyncio.to_thread(self._archive.delete, volume, snapshot.id)
        await asyncio.to_thread(self.driver.delete_snapshot, snapshot.id)
        await asyncio.to_thread(_unlink, os.path.join(self._bases, snapshot.id))
        await self._store.delete(snapshot.id)

    async def forget(self, context: str) -> None:
        """Delete everything of a context but its filespace: files, snapshots, archive, metrics."""
        volume = encode(context, ephemeral=False)
        await asyncio.to_thread(self.driver.delete_volume, volume)
        while records := (await self._store.page(context, limit=100))[0]:
            for record in records:
                await asyncio.to_thread(self.driver.delete_snapshot, record.id)
                await asyncio.to_thread(_unlink, os.path.join(self._bases, record.id))
                await self._store.delete(record.id)
        await self.base.forget(context)
        self.metrics.forget(context)
        try:
            await asyncio.to_thread(self._archive.forget, volume)
        except ArchiveUnavailable as error:
            log.warning("the archive of context '%s' could not be deleted: %s", context, error)

    async def contexts(self) -> list[str]:
        """The contexts that have files here."""
        volumes = await asyncio.to_thread(self.driver.volumes)
        return [decode(volume) for volume in volumes if volume.startswith("ctx-")]

    async def leave(self, context: str) -> None:
        """The context is on another server now: its files here are old, its archived snapshots are elsewhere too."""
        await asyncio.to_thread(self.driver.delete_volume, encode(context, ephemeral=False))
        for snapshot in await self._store.all_ready(context):
            if snapshot.archived:
                await asyncio.to_thread(self.driver.delete_snapshot, snapshot.id)

    def collect_garbage(self) -> None:
        """Free what deleted snapshots left, here and in the archive. Blocking."""
        self.driver.collect_garbage()
        self._archive.collect()

    # after a restart

    async def recover(self) -> None:
        """A snapshot that was being made on this server is whole, or it failed."""
        for path in (self._bases, self._origins):
            await asyncio.to_thread(os.makedirs, path, 0o700, exist_ok=True)
        whole = set(await asyncio.to_thread(self.driver.snapshots))
        for record in await self._store.in_status(SnapshotStatus.CREATING):
            if record.node not in {None, self.node}:
                continue
            if record.id in whole:
                facts = await asyncio.to_thread(self.driver.facts, record.id)
                await self._store.ready(record.id, size=facts.bytes, new_bytes=facts.new_bytes, files=facts.files)
            else:
                await self._store.failed(record.id, "the server ended while it was made")
        for stray in whole - await self._store.ids(self.node):  # its record was given up while it was being made
            await asyncio.to_thread(self.driver.delete_snapshot, stray)

    async def sweep(self, keep: set[str]) -> None:
        """Remove the ephemeral workspaces that belong to no sandbox in `keep`."""
        for volume in await asyncio.to_thread(self.driver.volumes):
            if volume.startswith("eph-") and volume.removeprefix("eph-") not in keep:
                try:
                    await asyncio.to_thread(self.driver.delete_volume, volume)
                except (CarrelError, OSError):
                    log.exception("the workspace %s could not be removed", volume)

    # what the filespace knew when a snapshot was taken

    async def _base_of(self, volume: str, snapshot: SnapshotRecord) -> bytes:
        kept = await asyncio.to_thread(_read, os.path.join(self._bases, snapshot.id))
        if kept or not snapshot.archived:
            return kept
        try:
            return await asyncio.to_thread(self._archive.attachment, volume, snapshot.id)
        except (ArchiveUnavailable, NotFound, SnapshotDamaged):
            return b""  # a merge without history loses nothing


def _write(path: str, data: bytes) -> None:
    try:
        with open(path, "wb") as file:
            file.write(data)
    except OSError as error:
        raise PlatformError(f"{path} cannot be written: {error.strerror}") from None


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return b""


def _unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def cap_bytes(record: SessionRecord) -> int | None:
    """The cap of a workspace."""
    return record.limits.disk_mb * MB if record.limits.disk_mb is not None else None


def archive_notice(error: CarrelError) -> str:
    """What a session says while its snapshots wait for the archive."""
    return f"snapshots wait on this server: {error.detail}"[:2000]


def _context(record: SessionRecord) -> str:
    if record.context_id is None:
        raise Conflict(
            "an ephemeral sandbox keeps nothing, so it has no snapshots",
            field="id",
            hint="make the sandbox with a context_id",
        )
    return record.context_id
