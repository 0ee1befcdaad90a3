"""Background upkeep: renews leases, watches disk use, takes checkpoints, archives them, stops idle sandboxes, deletes
old workspaces, prunes the audit log.

Acts only through sessions and operations; takes no decisions about agents.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime

from carrel.audit import AuditLog
from carrel.config import Settings
from carrel.control.operations.caller import OWN_WORK
from carrel.control.operations.operations import OwnOperations
from carrel.control.sessions.leases import LeaseUpkeep
from carrel.control.sessions.lifecycle import TIME_OVER, until_of
from carrel.control.sessions.live import LiveSandbox, SessionNotes
from carrel.control.sessions.retention import WorkspaceRetention
from carrel.control.sessions.sessions import Sessions
from carrel.control.workspaces.filespace_files import FilespaceFiles
from carrel.control.workspaces.snapshots import Snapshots
from carrel.control.workspaces.workspaces import Workspaces
from carrel.errors import CarrelError, Conflict
from carrel.models import AuditPruned
from carrel.store import SessionStore
from carrel.workspaces.usage import max_entries, measure, verdict

log = logging.getLogger("carrel.upkeep")

FLUSH_EVERY = 3.0
BUSY_EVERY = 1.0
IDLE_EVERY = 30.0
TICK = 0.25
COST_FACTOR = 10.0
GIVE_UP_AFTER = 3
IDLE_LOOK_EVERY = 15.0
EXPIRE_EVERY = 3600.0
CHECKPOINT_LOOK_EVERY = 15.0
CATCH_UP_EVERY = 5.0
PUSH_EVERY = 2.0
DAY_S = 86_400.0
GROW_EVERY = 1.0
LIFETIME_EVERY = 0.5


Work = tuple[Callable[[], Awaitable[object]], float]
"""A task, and its interval in seconds."""


class _DiskWatch:
    """The state of the disk watch for one sandbox."""

    __slots__ = ("growing", "next_busy", "next_idle", "seen")

    def __init__(self) -> None:
        self.next_busy = 0.0
        self.next_idle = 0.0
        self.seen = 0
        self.growing = 0


class Upkeep:
    """The background loops of a control plane."""

    def __init__(
        self,
        sessions: Sessions,
        leasing: LeaseUpkeep,
        operations: OwnOperations,
        snapshots: Snapshots,
        workspaces: Workspaces,
        retention: WorkspaceRetention,
        store: SessionStore,
        audit: AuditLog,
        settings: Settings,
        notes: SessionNotes,
        files: FilespaceFiles,
        more: Sequence[Work],
        of_server: Sequence[Work],
        *,
        first: bool,
    ):
        """`more` is done by every worker, `of_server` only by the `first`, as what concerns the whole server."""
        self._first = first
        self._of_server = of_server
        self._settings = settings.sandbox
        self._keep_days = settings.audit.keep_days
        self._lease_s = settings.lease_s
        self._sessions = sessions
        self._leasing = leasing
        self._operations = operations
        self._snapshots = snapshots
        self._workspaces = workspaces
        self._retention = retention
        self._store = store
        self._audit = audit
        self._flushed: dict[str, float] = {}
        self._described: dict[str, tuple[int, float]] = {}
        self._watches: dict[str, _DiskWatch] = {}
        self._checkpoints: dict[str, float] = {}
        self._generations: dict[str, int | None] = {}
        self._notes = notes
        self._files = files
        self._more = more

    async def run(self) -> None:
        """Run until cancelled."""
        settings = self._settings
        loops: list[Work] = [
            (self.flush, FLUSH_EVERY),
            (self.renew_leases, self._lease_s / 3),
            (self.stop_idle, min(IDLE_LOOK_EVERY, settings.idle_stop_s / 4)),
            (self.end_lifetimes, LIFETIME_EVERY),
            (self.end_at_their_time, LIFETIME_EVERY),
            (self.checkpoint, min(CHECKPOINT_LOOK_EVERY, settings.checkpoint_s / 4)),
            (self.push_filespaces, PUSH_EVERY),
            (self.describe, IDLE_EVERY),
            (self.collect_filespaces, EXPIRE_EVERY),
            *self._more,
        ]
        if self._first:
            loops += [
                (self.catch_up, min(CATCH_UP_EVERY, settings.checkpoint_s / 4)),
                (self.count, IDLE_EVERY),
                (self.grow_volumes, GROW_EVERY),
                (self._retention.sweep, EXPIRE_EVERY),
                (self.collect_garbage, EXPIRE_EVERY),
                *self._of_server,
            ]
        if self._workspaces.driver.kernel_quota:
            loops.append((self.read_usage, IDLE_EVERY))
        else:
            loops.append((self.watch_disks, TICK))
        if self._keep_days is not None and self._first:
            loops.append((self.prune_audit, EXPIRE_EVERY))
        async with asyncio.TaskGroup() as group:
            if self._first:
                group.create_task(self._once(self._retention.recall))
            for work, seconds in loops:
                group.create_task(self._repeat(work, seconds))

    async def _once(self, work: Callable[[], Awaitable[object]]) -> None:
        try:
            await work()
        except Exception:
            log.exception("upkeep failed")

    async def _repeat(self, work: Callable[[], Awaitable[object]], seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                await work()
            except Exception:
                log.exception("upkeep failed; it is tried again")

    async def flush(self) -> None:
        """Write the last activity of sandboxes that were used since the last flush."""
        boxes = self._sessions.live()
        changed = {
            box.record.id: box.last_activity
            for box in boxes
            if self._flushed.get(box.record.id, box.record.last_activity_at) < box.last_activity
        }
        await self._store.touch(changed)
        alive = {box.record.id for box in boxes}
        self._flushed = {key: value for key, value in (self._flushed | changed).items() if key in alive}

    async def renew_leases(self) -> None:
        """Renew the leases of this server, and end the sessions of silent servers."""
        await self._leasing.renew()
        await self._leasing.end_abandoned()

    async def checkpoint(self) -> None:
        """Archive a snapshot of every changed workspace whose last checkpoint is old enough."""
        now = time.monotonic()
        boxes = {box.record.id: box for box in self._stored()}
        self._checkpoints = {key: self._checkpoints.get(key, now) for key in boxes}
        self._generations = {key: self._generations.get(key) for key in boxes}
        for key, box in boxes.items():
            if now - self._checkpoints[key] < self._settings.checkpoint_s:
                continue
            self._checkpoints[key] = time.monotonic()
            try:
                if await self._changed(box):
                    await self._snapshots.checkpoint(box.record)
            except CarrelError as error:
                log.warning("no checkpoint of sandbox %s: %s", key, error)
                await self._notes.write(box.record, notice=f"no checkpoint could be taken: {error.detail}"[:2000])

    def _stored(self) -> list[LiveSandbox]:
        """Return the running sandboxes whose files carrel stores for a context."""
        records = ((box, box.record) for box in self._sessions.live())
        return [box for box, record in records if not record.ephemeral and record.workspace_path is None]

    async def _changed(self, box: LiveSandbox) -> bool:
        """Whether a workspace may have changed since its last checkpoint; any operation counts as a change."""
        volume = self._workspaces.volume(box.record)
        generation = await asyncio.to_thread(self._workspaces.driver.generation, volume)
        known = self._generations[box.record.id]
        self._generations[box.record.id] = generation
        if generation is not None and known is not None:
            return generation != known
        changed = box.changed or await self._anything_runs(box)
        box.changed = False
        return changed

    async def catch_up(self) -> None:
        for context, notice in (await self._workspaces.keeping.catch_up()).items():
            record = await self._store.of_context(context)
            if record is not None and record.notice != notice:
                await self._notes.write(record, notice=notice)

    async def push_filespaces(self) -> None:
        """Push changed workspaces to their filespaces, once no operation is under way."""
        for box in self._sessions.live():
            if not box.record.filespace or not box.to_push or box.in_flight or box not in self._sessions.live():
                continue  # it may have ended while another was being pushed
            box.to_push = False
            try:
                await self._files.save(box.record, box.workspace)
            except CarrelError as error:
                log.warning("sandbox %s: its filespace could not be synced: %s", box.record.id, error)

    async def read_usage(self) -> None:
        """Read the sizes of all workspaces from the kernel."""
        for box in self._stored():
            context = box.record.context_id
            if context is not None:
                used = await self._workspaces.usage(box.record)
                box.used_bytes = used
                self._workspaces.report(box.record, used, box.last_activity)

    async def describe(self) -> None:
        """Write the sizes of used workspaces into their records and into the workspaces themselves."""
        alive = {box.record.id for box in self._sessions.live()}
        self._described = {key: value for key, value in self._described.items() if key in alive}
        for box in self._sessions.live():
            used, moment = box.used_bytes, box.last_activity
            if box.record.context_id is None or used is None or self._described.get(box.record.id) == (used, moment):
                continue
            await self._workspaces.describe(box.record, used, moment)
            with suppress(Conflict):  # another server owns it by now
                await self._store.update(box.record.id, fence=box.record.fence, used_bytes=used)
            self._described[box.record.id] = used, moment

    async def count(self) -> None:
        """Count sessions, and measure how full the volume is."""
        self._workspaces.metrics.sandboxes(await self._store.counts())
        facts = await asyncio.to_thread(os.statvfs, self._workspaces.driver.directory)
        capacity = facts.f_blocks * facts.f_frsize
        self._workspaces.metrics.volume(capacity - facts.f_bfree * facts.f_frsize, capacity)

    async def grow_volumes(self) -> None:
        """Let the volume driver grow its storage if necessary."""
        await asyncio.to_thread(self._workspaces.driver.grow_if_needed)

    async def collect_garbage(self) -> None:
        """Free the space of deleted snapshots."""
        await asyncio.to_thread(self._workspaces.collect_garbage)

    async def collect_filespaces(self) -> None:
        """Free the space of deleted files of filespaces."""
        for box in self._sessions.live():
            if box.record.filespace and box.record.context_id is not None:
                await self._files.collect(box.record.context_id)

    async def prune_audit(self, by: str | None = None) -> AuditPruned:
        """Remove audit records that are too old; `Conflict` when the server keeps them for ever."""
        if self._keep_days is None:
            raise Conflict(
                "this server keeps its audit log for ever",
                field="audit.keep_days",
                hint="let the operator set CARREL_AUDIT_KEEP_DAYS",
            )
        # By whole days, so that at most one removal a day is recorded, however often this is called.
        before = (time.time() - self._keep_days * DAY_S) // DAY_S * DAY_S
        removed = await self._audit.prune(before, by)
        if removed:
            log.info("%d audit records of before %s were removed", removed, datetime.fromtimestamp(before, UTC))
        return AuditPruned(before=datetime.fromtimestamp(before, UTC), records=removed)

    async def stop_idle(self) -> None:
        """Stop the sandboxes that were idle for long enough; a process that runs counts as use."""
        horizon = time.time() - self._settings.idle_stop_s
        for box in self._sessions.live():
            if box.last_activity > horizon or box.in_flight:
                continue
            try:
                if (await self._operations.health(OWN_WORK, box.record.id)).state == "busy":
                    box.last_activity = time.time()
                    continue
                if await self._sessions.stop_idle(box, horizon):
                    log.info("sandbox %s was idle and is stopped", box.record.id)
            except CarrelError as error:
                log.warning("sandbox %s could not be stopped: %s", box.record.id, error)

    async def end_lifetimes(self) -> None:
        """End the sandboxes whose lifetime is over, also while commands run, side by side."""
        now = time.time()
        over = [box for box in self._sessions.live() if box.record.ends_at is not None and box.record.ends_at <= now]

        async def end(box: LiveSandbox) -> None:
            try:
                if await self._sessions.end_of_life(box):
                    log.info("sandbox %s is ended: its lifetime is over", box.record.id)
            except CarrelError as error:
                log.warning("sandbox %s could not be ended at the end of its lifetime: %s", box.record.id, error)

        await asyncio.gather(*map(end, over))

    async def end_at_their_time(self) -> None:
        """End the sandboxes whose label says when. One that is to be stopped is used no more: nothing runs in it."""
        now = time.time()
        for box in self._sessions.live():
            until = until_of(box.record.labels)
            if until is None or until[0] > now:
                continue
            key, terminates = box.record.id, until[1] == "terminate"
            try:
                if terminates:
                    await self._sessions.terminate(OWN_WORK, key, TIME_OVER, delete_workspace=True)
                elif box.in_flight or await self._anything_runs(box) or not await self._sessions.stop_idle(box, now):
                    continue
                log.info("sandbox %s is ended: %s", key, TIME_OVER)
            except CarrelError as error:
                log.warning("sandbox %s could not be ended at its time: %s", key, error)

    async def watch_disks(self) -> None:
        boxes = {box.record.id: box for box in self._sessions.live()}
        self._watches = {key: watch for key, watch in self._watches.items() if key in boxes}
        for key, box in boxes.items():
            disk_mb = box.record.limits.disk_mb
            if disk_mb is None:
                continue
            watch = self._watches.setdefault(key, _DiskWatch())
            now = time.monotonic()
            busy = box.used or box.in_flight > 0 or box.over_quota is not None
            if now >= (watch.next_busy if busy else watch.next_idle):
                await self._look(box, watch, disk_mb)

    async def _look(self, box: LiveSandbox, watch: _DiskWatch, disk_mb: int) -> None:
        box.used = False
        usage = await measure(
            box.workspace, stop_bytes=disk_mb * 1024 * 1024 * 2, stop_entries=max_entries(disk_mb) * 2
        )
        if self._sessions.find_live(box.record.id) is not box:  # it ended meanwhile, and its files are gone
            return
        if (
            usage.bytes <= disk_mb * 1024 * 1024
        ):  # deleted files that are still open are found only through their processes
            usage = replace(usage, bytes=usage.bytes + await box.provider.held_bytes(box.handle))
        if box.record.context_id is not None:
            box.used_bytes = usage.bytes
            self._workspaces.report(box.record, usage.bytes, box.last_activity)
        now = time.monotonic()
        watch.next_busy = now + max(BUSY_EVERY, COST_FACTOR * usage.seconds)
        watch.next_idle = now + max(IDLE_EVERY, COST_FACTOR * usage.seconds)
        why, before = verdict(usage, disk_mb), box.over_quota
        box.over_quota = why
        if why is None:
            watch.seen = watch.growing = 0
            if not box.used and await self._anything_runs(box):
                box.used = True  # a background command writes without any operation
            return
        watch.growing = watch.growing + 1 if usage.bytes + usage.entries > watch.seen else 0
        watch.seen = usage.bytes + usage.entries
        if why != before:  # logged once, not at every measurement
            log.warning("sandbox %s: %s; its commands are ended until it is not", box.record.id, why)
        await self._end_commands(box)
        if watch.growing > GIVE_UP_AFTER:
            await self._sessions.stop(box.record.id, "disk", error=f"{why}, and it kept growing")

    async def _anything_runs(self, box: LiveSandbox) -> bool:
        try:
            return (await self._operations.health(OWN_WORK, box.record.id)).state == "busy"
        except CarrelError:
            return True

    async def _end_commands(self, box: LiveSandbox) -> None:
        """End the running commands; if processes of ended commands still run, delete those commands too."""
        try:
            known = (await self._operations.list_commands(OWN_WORK, box.record.id)).items
            ends = [command for command in known if command.running]
            if not ends and await self._anything_runs(box):
                ends = known
            for command in ends:
                await self._operations.delete_command(OWN_WORK, box.record.id, command.id)
        except CarrelError as error:
            log.warning("sandbox %s: its commands could not be ended: %s", box.record.id, error)
            await self._sessions.stop(box.record.id, "disk", error="over its disk limit and not answering")
