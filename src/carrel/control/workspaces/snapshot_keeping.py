"""Keeps workspaces as snapshots: takes, archives, prunes and deletes them.

Connects the volume driver and the archive with the records of snapshots. Knows nothing of sandboxes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace

from carrel.control.workspaces.filespace_bases import FilespaceBases
from carrel.errors import ArchiveUnavailable, CarrelError, Conflict, NotFound, PlatformError, SnapshotDamaged
from carrel.metrics import OK, Metrics, outcome_of
from carrel.primitives.process_locks import LocksOf
from carrel.store import SessionRecord
from carrel.store.snapshots import SnapshotRecord, SnapshotStatus, SnapshotStore
from carrel.workspaces.archive import Archive
from carrel.workspaces.layout import Layout, encode
from carrel.workspaces.volumes import VolumeDriver

log = logging.getLogger("carrel.keeping")

AUTOMATIC = frozenset({"checkpoint", "stop", "fork"})
"""The reasons of snapshots that no caller asked for."""
KEPT = 3
"""How many of those are kept."""

Save = Callable[[SessionRecord, str], Awaitable[None]]
"""Saves a workspace elsewhere; the second argument is its path."""


class SnapshotKeeping:
    """The snapshots of one server."""

    def __init__(
        self,
        layout: Layout,
        driver: VolumeDriver,
        store: SnapshotStore,
        archive: Archive,
        bases: FilespaceBases,
        node: str,
        metrics: Metrics,
        locks: LocksOf,
    ):
        self._store = store
        self._archive = archive
        self._locks = locks
        self._users: Counter[str] = Counter()
        self._awaited: dict[str, SnapshotRecord] = {}
        self._bases = os.path.join(layout.cache, "bases")
        self._origins = os.path.join(layout.cache, "origins")
        self.driver = driver
        self.node = node
        self.metrics = metrics
        self.base = bases

    def prepare(self) -> None:
        for path in (self._bases, self._origins):
            os.makedirs(path, 0o700, exist_ok=True)

    def forked(self, volume: str, origin: str) -> None:
        """Record the origin of a new volume: data that the origin has in the archive is not sent again. Blocking."""
        _write(os.path.join(self._origins, volume), origin.encode())

    def forget(self, snapshot_id: str) -> None:
        """Forget the base of a deleted snapshot. Blocking."""
        _unlink(os.path.join(self._bases, snapshot_id))

    def still(self, context: str) -> AbstractAsyncContextManager[object]:
        """Return the lock that keeps syncs and snapshots of a context apart: each sees the other
        whole or not at all.
        """
        return self._locks(f"still {context}")

    @asynccontextmanager
    async def using(self, *snapshot_ids: str) -> AsyncIterator[None]:
        """Keep the files of these snapshots for the block. Check in the block whether they are ready: a snapshot that
        is dropped meanwhile is deleted after its last use.
        """
        self._users.update(snapshot_ids)
        try:
            yield
        finally:
            self._users.subtract(snapshot_ids)
            for name in snapshot_ids:
                if self._users[name] <= 0:
                    del self._users[name]
                    awaited = self._awaited.pop(name, None)
                    if awaited is not None:
                        await asyncio.shield(self._delete_later(awaited))

    async def take(self, record: SessionRecord, reason: str) -> SnapshotRecord:
        """Take a snapshot on this server; a sandbox may continue to write meanwhile."""
        context = context_of(record)
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
                facts = await asyncio.to_thread(self.driver.snapshot, volume_of(record), name, parent)
            except BaseException as error:
                outcome = outcome_of(error)
                words = error.detail if isinstance(error, CarrelError) else "it was cancelled"
                await self._store.failed(name, words[:2000])
                raise
            finally:
                self.metrics.snapshotted(self.driver.name, outcome, time.monotonic() - began)
            await self._store.ready(name, size=facts.bytes, new_bytes=facts.new_bytes, files=facts.files)
        return replace(
            made, status=SnapshotStatus.READY, bytes=facts.bytes, new_bytes=facts.new_bytes, files=facts.files
        )

    async def archive(self, snapshot: SnapshotRecord) -> None:
        """Archive a snapshot of this server; `ArchiveUnavailable` when the archive cannot be reached."""
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
        if origin is not None:  # new snapshots are now based on its own ones
            await asyncio.to_thread(_unlink, os.path.join(self._origins, volume))

    async def archive_and_prune(self, snapshot: SnapshotRecord) -> str | None:
        """Archive a snapshot and prune old ones; return a notice for the session if the archive fails."""
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

    async def keep(self, record: SessionRecord, save: Save) -> tuple[str | None, str | None, str | None]:
        """Push, snapshot, archive; return the newest snapshot, the notice of the session, and what failed."""
        failure: str | None = None
        try:
            await save(record, self.driver.path(volume_of(record)))
        except CarrelError as error:
            failure = f"the filespace could not be synced: {error.detail}"[:2000]
        try:
            taken = await self.take(record, "stop")
        except CarrelError as error:
            log.warning("no snapshot of %s: %s", record.context_id, error)
            return record.snapshot, record.notice, f"no snapshot could be taken: {error.detail}"[:2000]
        return taken.id, await self.archive_and_prune(taken), failure

    async def catch_up(self) -> dict[str, str | None]:
        """Retry what the archive could not do before; return the notice of each context, None if all is well."""
        await self.finish_deletions()
        said: dict[str, str | None] = {}
        for snapshot in await self._store.unarchived(self.node):
            try:
                await self.archive(snapshot)
                said[snapshot.context_id] = None
            except NotFound:  # pruned or deleted meanwhile
                continue
            except ArchiveUnavailable as error:
                said[snapshot.context_id] = archive_notice(error)
                break  # the others would fail too
            except CarrelError as error:
                log.warning("snapshot %s cannot be archived: %s", snapshot.id, error)
                said[snapshot.context_id] = archive_notice(error)
        return said

    async def prune(self, context: str) -> bool:
        """Delete the older automatic snapshots; return whether any was deleted."""
        ready = await self._store.all_ready(context)
        automatic = [snapshot for snapshot in ready if snapshot.reason in AUTOMATIC]
        safe = next((snapshot.id for snapshot in ready if snapshot.archived), None)
        doomed = [snapshot for snapshot in automatic[KEPT:] if snapshot.id != safe and not self._users[snapshot.id]]
        for snapshot in doomed:
            try:
                await self.drop(snapshot)
            except ArchiveUnavailable:
                return False  # tried again with the next snapshot
        return bool(doomed)

    async def drop(self, snapshot: SnapshotRecord) -> None:
        """Delete a snapshot for good, here and in the archive. One in use is already gone for everybody else."""
        # first, because a snapshot recorded as ready is complete at every moment
        await self._store.start_deletion(snapshot.context_id, snapshot.id)
        if self._users[snapshot.id]:
            self._awaited[snapshot.id] = snapshot
        else:
            await self._delete(snapshot)

    async def _delete_later(self, snapshot: SnapshotRecord) -> None:
        try:
            await self._delete(snapshot)
        except CarrelError as error:  # tried again with the next snapshot
            log.warning("snapshot %s could not be deleted yet: %s", snapshot.id, error)

    async def _delete(self, snapshot: SnapshotRecord) -> None:
        volume = encode(snapshot.context_id, ephemeral=False)
        if snapshot.archived:
            await asyncio.to_thread(self._archive.delete, volume, snapshot.id)
        await asyncio.to_thread(self.driver.delete_snapshot, snapshot.id)
        await asyncio.to_thread(_unlink, os.path.join(self._bases, snapshot.id))
        await self._store.delete(snapshot.id)

    async def finish_deletions(self) -> None:
        """Finish deletions that were interrupted by the end of the server or by an unreachable archive."""
        for record in await self._store.unfinished_deletions():
            if record.node in {None, self.node}:
                try:
                    await self.drop(record)
                except ArchiveUnavailable as error:
                    log.warning("snapshot %s could not be deleted yet: %s", record.id, error)
                    return

    async def base_of(self, volume: str, snapshot: SnapshotRecord) -> bytes:
        """Return the sync state of the filespace when a snapshot was taken."""
        kept = await asyncio.to_thread(_read, os.path.join(self._bases, snapshot.id))
        if kept or not snapshot.archived:
            return kept
        try:
            return await asyncio.to_thread(self._archive.attachment, volume, snapshot.id)
        except (ArchiveUnavailable, NotFound, SnapshotDamaged):
            return b""  # a merge without a common state loses nothing


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


def archive_notice(error: CarrelError) -> str:
    """Return the notice of a session whose snapshots wait for the archive."""
    return f"snapshots wait on this server: {error.detail}"[:2000]


def volume_of(record: SessionRecord) -> str:
    """Return the name of the volume of a session."""
    return encode(record.owner, ephemeral=record.ephemeral)


def context_of(record: SessionRecord) -> str:
    """Return the context of a session; `Conflict` for an ephemeral sandbox."""
    if record.context_id is None:
        raise Conflict(
            "an ephemeral sandbox keeps nothing, so it has no snapshots",
            field="id",
            hint="make the sandbox with a context_id",
        )
    return record.context_id
