"""The files of contexts: provides them to sandboxes, restores, moves, forks and deletes them.

Connects the volume driver and the archive with the records. Knows nothing of sandboxes: the caller makes sure that none
uses a workspace whose files are replaced.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from carrel.control.workspaces.filespace_bases import FilespaceBases
from carrel.control.workspaces.snapshot_keeping import AUTOMATIC, Save, SnapshotKeeping, context_of, volume_of
from carrel.control.workspaces.stored import StoredSnapshots
from carrel.errors import ArchiveUnavailable, CarrelError, Conflict, NotFound, SnapshotDamaged, Unsupported
from carrel.metrics import Metrics
from carrel.models import State, WorkspaceUsage
from carrel.models.base import namespace_of
from carrel.primitives.process_locks import LocksOf, ProcessLocks
from carrel.store import SessionRecord
from carrel.store.snapshots import SnapshotRecord, SnapshotStatus, SnapshotStore
from carrel.workspaces.archive import Archive
from carrel.workspaces.layout import Layout, WorkspaceFacts, decode, encode
from carrel.workspaces.marks import Marks
from carrel.workspaces.volumes import VolumeDriver

log = logging.getLogger("carrel.workspaces")

MB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Provided:
    """A workspace that is ready for a sandbox."""

    path: str
    new: bool = False
    notice: str | None = None


class Workspaces:
    """The workspaces of one server."""

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
        others: ProcessLocks | None,
        *,
        ttl_days: float | None,
    ):
        """`locks` are those of sessions. `others` are the same if other workers have this data directory too."""
        self._others = others
        self._layout = layout
        self._store = store
        self._archive = archive
        self._ttl_days = ttl_days
        self._marks = Marks(os.path.join(layout.cache, "marks"))
        self.stored = StoredSnapshots(driver, archive, layout.cache)
        self.driver = driver
        self.node = node
        self.metrics = metrics
        self.keeping = SnapshotKeeping(layout, driver, store, archive, bases, node, metrics, locks)

    def volume(self, record: SessionRecord) -> str:
        return volume_of(record)

    def path(self, record: SessionRecord) -> str:
        """Return the path of the workspace of a session."""
        return record.workspace_path or self.driver.path(self.volume(record))

    # for a sandbox

    async def provide(self, record: SessionRecord, previous: SessionRecord | None) -> Provided:
        """Return the workspace for a sandbox that is about to start: the one here, else restored, else new.

        `previous` is the last record of the context, on this server. A folder of the host is used as it is.
        """
        if record.workspace_path is not None:
            return Provided(record.workspace_path)
        volume = self.volume(record)
        if self._others is not None and record.context_id is not None:
            await self._discard_unfinished(self._others, volume, record.context_id)
        if await asyncio.to_thread(self.driver.exists, volume):
            return Provided(await asyncio.to_thread(self._reopen, record, volume))
        if previous is not None and record.context_id is not None:
            snapshots = await self._store.all_ready(record.context_id)
            if snapshots:
                return await self._bring(record, snapshots)
        return Provided(await self._make(record, volume), new=True)

    async def _discard_unfinished(self, others: ProcessLocks, volume: str, context: str) -> None:
        """Delete what a worker that died had begun to make: the caller has the lock under which it was made."""
        if await asyncio.to_thread(self._marks.is_making, volume):
            async with others.unless_held(f"fork {context}") as free:
                if free:
                    await asyncio.to_thread(self.driver.delete_volume, volume)
                    await asyncio.to_thread(self._marks.clear, volume)

    async def move(self, record: SessionRecord, previous: SessionRecord, *, silent: bool) -> Provided:
        """Restore the workspace of a context that was on another server, from the newest snapshot.

        `silent`: the other server no longer answers, so that data it had not archived is lost. Older files here are
        replaced.
        """
        snapshots = await self._store.all_ready(context_of(record))
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
        path = await self._make(record, self.volume(record))
        words = f"server '{previous.node}' no longer answers, and had archived nothing of this workspace"
        return Provided(path, new=True, notice=words if silent else None)

    def _reachable(self, snapshot: SnapshotRecord) -> bool:
        return snapshot.archived or snapshot.node in {None, self.node}

    async def _make(self, record: SessionRecord, volume: str, *, whole: bool = True) -> str:
        """Make a new workspace. The sync state of an earlier one is forgotten, or its files would look deleted."""
        if record.context_id is not None:
            await self.keeping.base.forget(record.context_id)
        return await asyncio.to_thread(lambda: self._create(record, volume, whole=whole))

    def _create(self, record: SessionRecord, volume: str, *, whole: bool) -> str:
        if not record.ephemeral:  # leftovers of ephemeral ones are found without a mark
            self._marks.making(volume)
        self.driver.create(volume, cap_bytes(record))
        path = self.driver.path(volume)
        try:
            self._prepare(record, path, new=True)
        except BaseException:
            self.driver.delete_volume(volume)
            raise
        if whole:
            self._marks.whole(volume)
        return path

    async def recorded(self, record: SessionRecord) -> None:
        """Record that the session of a new workspace is stored."""
        if not record.ephemeral and record.workspace_path is None:
            await asyncio.to_thread(self._marks.clear, self.volume(record))

    def _reopen(self, record: SessionRecord, volume: str) -> str:
        cap = cap_bytes(record)
        if self.driver.cap(volume) != cap:
            self.driver.set_cap(volume, cap)
        path = self.driver.path(volume)
        self._prepare(record, path, new=False)
        return path

    def _prepare(self, record: SessionRecord, path: str, *, new: bool) -> None:
        used = record.used_bytes or 0
        if not new and self.driver.kernel_quota:
            used = self.driver.usage(os.path.basename(path))
        self._layout.prepare_workspace(path, self._facts(record, 0 if new else used, None), new=new)

    def _facts(self, record: SessionRecord, used: int, last_accessed: float | None) -> WorkspaceFacts:
        context = record.context_id
        namespace = None if context is None else namespace_of(context)
        ttl_days = 0 if record.ephemeral else self._ttl_days
        return WorkspaceFacts(context, namespace, record.agent, last_accessed, ttl_days, used)

    async def describe(self, record: SessionRecord, used: int, last_accessed: float) -> None:
        """Write the size and the last use of a workspace into it and into the metrics."""
        self.report(record, used, last_accessed)
        facts = self._facts(record, used, last_accessed)
        try:
            await asyncio.to_thread(self._layout.describe, self.path(record), facts)
        except OSError as error:  # it is full, or is just being replaced
            log.info("the description of %s is not up to date: %s", record.owner, error)

    def report(self, record: SessionRecord, used: int, last_accessed: float) -> None:
        """Report the size and the last use of a workspace to the metrics."""
        context = record.context_id
        if context is not None:
            namespace, agent = namespace_of(context), record.agent or ""
            self.metrics.workspace(context, used, last_accessed, namespace=namespace, agent=agent)

    async def keep(self, record: SessionRecord, save: Save) -> tuple[SessionRecord, str | None]:
        """Keep the files of a session whose sandbox has ended: describe, push, snapshot, archive. Return the new
        record, and what failed. A folder of the host needs no keeping.
        """
        if record.workspace_path is not None:
            try:
                await save(record, record.workspace_path)
            except CarrelError as error:
                return record, error.detail[:2000]
            return record, None
        used = record.used_bytes
        try:
            used = await self.usage(record)
            await self.describe(record, used, record.last_activity_at)
        except CarrelError as error:
            log.warning("the workspace of %s could not be measured: %s", record.owner, error)
        snapshot, notice, failure = await self.keeping.keep(record, save)
        return replace(record, snapshot=snapshot, notice=notice, used_bytes=used), failure

    async def _bring(self, record: SessionRecord, snapshots: list[SnapshotRecord]) -> Provided:
        """Restore the newest good snapshot; the notice names the ones that were skipped."""
        volume = self.volume(record)
        new = not await asyncio.to_thread(self.driver.exists, volume)
        if new:  # not marked complete before the restore: else the next start would use it empty
            await self._make(record, volume, whole=False)
        else:  # if killed in between, an old snapshot must not look like changes: a merge without a state is safe
            await self.keeping.base.forget(context_of(record))
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
                await self.keeping.base.set(snapshot.context_id, await self.keeping.base_of(volume, snapshot))
                notice = f"restored from the last good snapshot {snapshot.id}; {'; '.join(passed)}"[:2000]
                path = await asyncio.to_thread(self._reopen, record, volume)
                await asyncio.to_thread(self._marks.whole, volume)
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
        """Replace the files of a workspace by those of a snapshot. The sync state stays: the filespace sees them as
        changes.
        """
        volume = self.volume(record)
        async with self.keeping.still(context_of(record)):  # or a push would take the removed files for deleted ones
            if not await asyncio.to_thread(self.driver.exists, volume):
                await self._make(record, volume, whole=False)
            await self._restore(volume, snapshot)
            await asyncio.to_thread(self._marks.clear, volume)

    async def fork(self, snapshot: SnapshotRecord, context: str, cap: int | None) -> None:
        """Make a workspace with the files of a snapshot, for a context that has none."""
        source, target = encode(snapshot.context_id, ephemeral=False), encode(context, ephemeral=False)
        await self.keeping.base.forget(context)
        await asyncio.to_thread(self._marks.making, target)
        await asyncio.to_thread(self.stored.fork, snapshot, target, cap)
        await asyncio.to_thread(self._marks.whole, target)
        await asyncio.to_thread(self.keeping.forked, target, source)

    async def exists(self, context: str) -> bool:
        """Whether a context has files here."""
        return await asyncio.to_thread(self.driver.exists, encode(context, ephemeral=False))

    async def discard(self, record: SessionRecord) -> None:
        """Delete the files of a workspace; a folder of the host is left alone."""
        if record.workspace_path is not None:
            return
        await asyncio.to_thread(self.driver.delete_volume, self.volume(record))

    async def usage(self, record: SessionRecord) -> int:
        """Return the size of a workspace in bytes."""
        refuse_folder(record, "the size is not measured")
        return await asyncio.to_thread(self.driver.usage, self.volume(record))

    async def report_usage(self, record: SessionRecord) -> WorkspaceUsage:
        """Return the size of a workspace and its limit."""
        return WorkspaceUsage(
            context_id=record.context_id,
            bytes=await self.usage(record),
            limit_bytes=cap_bytes(record),
            measured_at=datetime.now(UTC),
            enforced_by="kernel" if self.driver.kernel_quota else "watch",
        )

    # deleting

    async def forget(self, context: str) -> None:
        """Delete everything of a context but its filespace: files, snapshots, archive, metrics."""
        volume = encode(context, ephemeral=False)
        await self._store.start_deletion(context)  # or a half-deleted context could be restored from the rest
        async with self.keeping.still(context):  # or a push would take the removed files for deleted ones
            await asyncio.to_thread(self.driver.delete_volume, volume)
            await self.keeping.base.forget(context)
        while records := (await self._store.page(context, limit=100))[0]:
            for record in records:
                await asyncio.to_thread(self.driver.delete_snapshot, record.id)
                await asyncio.to_thread(self.keeping.forget, record.id)
                await self._store.delete(record.id)
        self.metrics.forget(context)
        try:
            await asyncio.to_thread(self._archive.forget, volume)
        except ArchiveUnavailable as error:
            log.warning("the archive of context '%s' could not be deleted: %s", context, error)

    async def asked_for(self, context: str) -> str | None:
        """Return the newest good snapshot that a caller took."""
        ready = await self._store.all_ready(context)
        return next((snapshot.id for snapshot in ready if snapshot.reason not in AUTOMATIC), None)

    async def expired(self, context: str) -> bool:
        """Whether `expire` would find nothing to delete."""
        ready = await self._store.all_ready(context)
        return all(snapshot.reason not in AUTOMATIC for snapshot in ready) and not await self.exists(context)

    async def expire(self, context: str) -> None:
        """Delete the files of a context and its automatic snapshots."""
        async with self.keeping.still(context):  # or a push would take the removed files for deleted ones
            await asyncio.to_thread(self.driver.delete_volume, encode(context, ephemeral=False))
            await self.keeping.base.forget(context)
        self.metrics.forget(context)
        for snapshot in await self._store.all_ready(context):
            if snapshot.reason in AUTOMATIC:
                await self.keeping.drop(snapshot)

    async def contexts(self) -> list[str]:
        """Return the contexts that have files here."""
        volumes = await asyncio.to_thread(self.driver.volumes)
        return [decode(volume) for volume in volumes if volume.startswith("ctx-")]

    async def leave(self, context: str) -> None:
        """Remove the files of a context that is on another server now, and the snapshots that are archived."""
        await asyncio.to_thread(self.driver.delete_volume, encode(context, ephemeral=False))
        for snapshot in await self._store.all_ready(context):
            if snapshot.archived:
                await asyncio.to_thread(self.driver.delete_snapshot, snapshot.id)

    def collect_garbage(self) -> None:
        """Free the space of deleted snapshots, here and in the archive. Blocking."""
        self.driver.collect_garbage()
        self._archive.collect()

    # after a restart

    async def recover_after_worker(self, sessions: set[str]) -> None:
        """Record the snapshots of these sessions that a dead worker was taking as failed. What it was making is removed
        by the next start of the context.
        """
        for record in await self._store.in_status(SnapshotStatus.CREATING):
            if record.session_id in sessions:
                await self._store.failed(record.id, "its worker ended while it was made")

    async def recover(self, known: Callable[[str], Awaitable[bool]]) -> None:
        """Finish or remove snapshots and workspaces that were being made when the server ended. No other worker runs.

        `known` returns whether a context has a session.
        """
        await asyncio.to_thread(self._marks.prepare)
        for volume, complete in (await asyncio.to_thread(self._marks.unfinished)).items():
            if not complete or not await known(decode(volume)):
                await asyncio.to_thread(self.driver.delete_volume, volume)
            await asyncio.to_thread(self._marks.clear, volume)
        await asyncio.to_thread(self.keeping.prepare)
        whole = set(await asyncio.to_thread(self.driver.snapshots))
        for record in await self._store.in_status(SnapshotStatus.CREATING):
            if record.node not in {None, self.node}:
                continue
            if record.id in whole:
                facts = await asyncio.to_thread(self.driver.facts, record.id)
                await self._store.ready(record.id, size=facts.bytes, new_bytes=facts.new_bytes, files=facts.files)
            else:
                await self._store.failed(record.id, "the server ended while it was made")
        await self.keeping.finish_deletions()
        for record in await self._store.in_status(SnapshotStatus.FAILED):
            if record.id in whole:  # it was cancelled while it was being made
                await asyncio.to_thread(self.driver.delete_snapshot, record.id)

    async def sweep(self, keep: set[str]) -> None:
        """Remove the ephemeral workspaces whose sandbox is not in `keep`."""
        for volume in await asyncio.to_thread(self.driver.volumes):
            if volume.startswith("eph-") and volume.removeprefix("eph-") not in keep:
                try:
                    await asyncio.to_thread(self.driver.delete_volume, volume)
                except (CarrelError, OSError):
                    log.exception("the workspace %s could not be removed", volume)


def refuse_folder(record: SessionRecord, why: str) -> None:
    """Raise `Unsupported` for a session whose workspace is a folder of the host."""
    if record.workspace_path is not None:
        raise Unsupported(
            f"the workspace is the folder {record.workspace_path}: {why}",
            field="id",
            hint="use checkpoints: they keep the states of a folder",
        )


def cap_bytes(record: SessionRecord) -> int | None:
    """Return the size limit of a workspace in bytes."""
    return record.limits.disk_mb * MB if record.limits.disk_mb is not None else None
