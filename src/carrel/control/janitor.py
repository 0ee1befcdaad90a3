"""Upkeep in the background: writes down last activity, watches disk use, stops what is idle, deletes what is old.

Acts only through sessions and operations; decides nothing about what an agent may do.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from carrel.config import SandboxSettings
from carrel.control.operations import SELF, Operations
from carrel.control.sessions import LiveSandbox, Sessions
from carrel.errors import CarrelError
from carrel.models import State
from carrel.store import SessionStore
from carrel.workspaces.usage import Usage, measure

log = logging.getLogger("carrel.janitor")

FLUSH_EVERY = 3.0
BUSY_EVERY = 1.0
IDLE_EVERY = 30.0
TICK = 0.25
COST_FACTOR = 10.0
ENTRIES_PER_MB = 200
MIN_ENTRIES = 10_000
GIVE_UP_AFTER = 3
IDLE_LOOK_EVERY = 15.0
EXPIRE_EVERY = 3600.0


def max_entries(disk_mb: int) -> int:
    """How many files and directories a workspace of that size may hold."""
    return max(MIN_ENTRIES, disk_mb * ENTRIES_PER_MB)


def verdict(usage: Usage, disk_mb: int) -> str | None:
    """Why a workspace is over its limit, or None. What cannot be seen counts as over."""
    if usage.bytes > disk_mb * 1024 * 1024:
        return f"the workspace is over its {disk_mb} MB"
    if usage.entries > max_entries(disk_mb):
        return f"the workspace has more than {max_entries(disk_mb)} files and directories"
    if not usage.complete:
        return "the workspace has directories that are nested too deep or cannot be read"
    return None


class _Watch:
    """What the disk watch remembers of one sandbox."""

    __slots__ = ("growing", "next_busy", "next_idle", "seen")

    def __init__(self) -> None:
        self.next_busy = 0.0
        self.next_idle = 0.0
        self.seen = 0
        self.growing = 0


class Janitor:
    """The background loops of a control plane."""

    def __init__(self, sessions: Sessions, operations: Operations, store: SessionStore, settings: SandboxSettings):
        self._settings = settings
        self._sessions = sessions
        self._operations = operations
        self._store = store
        self._flushed: dict[str, float] = {}
        self._watches: dict[str, _Watch] = {}

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._repeat(self.flush, FLUSH_EVERY))
            group.create_task(self._repeat(self.watch_disks, TICK))
            group.create_task(self._repeat(self.stop_idle, min(IDLE_LOOK_EVERY, self._settings.idle_stop_s / 4)))
            group.create_task(self._repeat(self.expire_workspaces, EXPIRE_EVERY))

    async def _repeat(self, work: Callable[[], Awaitable[None]], seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                await work()
            except Exception:
                log.exception("upkeep failed; it is tried again")

    async def flush(self) -> None:
        """Write the last activity of sandboxes that were used since the last time."""
        boxes = self._sessions.live()
        changed = {
            box.record.id: box.last_activity
            for box in boxes
            if self._flushed.get(box.record.id, box.record.last_activity_at) < box.last_activity
        }
        await self._store.touch(changed)
        alive = {box.record.id for box in boxes}
        self._flushed = {key: value for key, value in (self._flushed | changed).items() if key in alive}

    async def stop_idle(self) -> None:
        """Stop the sandboxes that nobody has used for long enough; what runs in one counts as use."""
        horizon = time.time() - self._settings.idle_stop_s
        for box in self._sessions.live():
            if box.last_activity > horizon or box.in_flight:
                continue
            try:
                if (await self._operations.health(box.record.id, SELF)).commands_running:
                    box.last_activity = time.time()
                    continue
                if await self._sessions.stop_idle(box, horizon):
                    log.info("sandbox %s was idle and is stopped", box.record.id)
            except CarrelError as error:
                log.warning("sandbox %s could not be stopped: %s", box.record.id, error)

    async def expire_workspaces(self) -> None:
        """End the sessions that were stopped long ago, and delete their workspaces."""
        horizon = time.time() - self._settings.workspace_ttl_days * 86_400
        for record in await self._store.in_states((State.STOPPED, State.ERROR)):
            if record.last_activity_at < horizon:
                await self._sessions.terminate(record.id, "expired", delete_workspace=True, unused_since=horizon)
                log.info("the workspace of %s was not used for long and is deleted", record.context_id or record.id)

    async def watch_disks(self) -> None:
        """Measure the workspaces that are due."""
        boxes = {box.record.id: box for box in self._sessions.live()}
        self._watches = {key: watch for key, watch in self._watches.items() if key in boxes}
        for key, box in boxes.items():
            disk_mb = box.record.limits.disk_mb
            if disk_mb is None:
                continue
            watch = self._watches.setdefault(key, _Watch())
            now = time.monotonic()
            busy = box.used or box.in_flight > 0 or box.over_quota is not None
            if now >= (watch.next_busy if busy else watch.next_idle):
                await self._look(box, watch, disk_mb)

    async def _look(self, box: LiveSandbox, watch: _Watch, disk_mb: int) -> None:
        box.used = False
        usage = await measure(
            box.workspace, stop_bytes=disk_mb * 1024 * 1024 * 2, stop_entries=max_entries(disk_mb) * 2
        )
        if usage.bytes <= disk_mb * 1024 * 1024:  # files without a name are found only through those who hold them
            usage = replace(usage, bytes=usage.bytes + await box.provider.held_bytes(box.handle))
        now = time.monotonic()
        watch.next_busy = now + max(BUSY_EVERY, COST_FACTOR * usage.seconds)
        watch.next_idle = now + max(IDLE_EVERY, COST_FACTOR * usage.seconds)
        why = verdict(usage, disk_mb)
        box.over_quota = why
        if why is None:
            watch.seen = watch.growing = 0
            if not box.used and await self._anything_runs(box):
                box.used = True  # a command in the background writes without any operation to tell of it
            return
        watch.growing = watch.growing + 1 if usage.bytes + usage.entries > watch.seen else 0
        watch.seen = usage.bytes + usage.entries
        log.warning("sandbox %s: %s; its commands are ended", box.record.id, why)
        await self._end_commands(box)
        if watch.growing > GIVE_UP_AFTER:
            await self._sessions.stop(box.record.id, "disk", error=f"{why}, and it kept growing")

    async def _anything_runs(self, box: LiveSandbox) -> bool:
        try:
            return (await self._operations.health(box.record.id, SELF)).state == "busy"
        except CarrelError:
            return True

    async def _end_commands(self, box: LiveSandbox) -> None:
        """End what runs; when it was left behind by commands that have ended, those are forgotten with it."""
        try:
            known = (await self._operations.list_commands(box.record.id, SELF)).items
            ends = [command for command in known if command.running]
            if not ends and await self._anything_runs(box):
                ends = known
            for command in ends:
                await self._operations.delete_command(box.record.id, command.id, SELF)
        except CarrelError as error:
            log.warning("sandbox %s: its commands could not be ended: %s", box.record.id, error)
            await self._sessions.stop(box.record.id, "disk", error="over its disk limit and not answering")
