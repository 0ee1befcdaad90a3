"""Deletes workspaces that were not used for a long time, after a warning. Snapshots that a caller took stay.

Decides by the records when a workspace is too old; `sessions` knows how to delete it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from datetime import UTC, datetime

from carrel.audit import AuditEntry, AuditLog, chain_of
from carrel.control.sessions.sessions import Sessions
from carrel.control.workspaces.workspaces import Workspaces
from carrel.errors import CarrelError
from carrel.models import SandboxInfo, State
from carrel.store import SessionRecord, SessionStore

log = logging.getLogger("carrel.retention")

DAY_S = 86_400.0
GONE_FOR_GOOD_S = DAY_S
"""How long another server has to delete a workspace of its own."""
LEAST_WARNING = 7
"""A warning comes a day before, or a seventh of the whole time before if that is less."""


def warning_s(ttl_s: float) -> float:
    """Return how long before the deletion the warning comes."""
    return min(DAY_S, ttl_s / LEAST_WARNING)


class WorkspaceRetention:
    """Deletes the old workspaces of one server. `ttl_days` None keeps all of them."""

    def __init__(
        self,
        sessions: Sessions,
        workspaces: Workspaces,
        store: SessionStore,
        audit: AuditLog,
        *,
        ttl_days: float | None,
    ):
        self._sessions = sessions
        self._workspaces = workspaces
        self._store = store
        self._audit = audit
        self._ttl_s = None if ttl_days is None else ttl_days * DAY_S

    async def sweep(self) -> None:
        """Warn of old workspaces, delete those that were warned of, and remove files that moved to another server."""
        await self._leave_moved()
        if self._ttl_s is None:
            return
        for record in [*await self._store.in_states((State.STOPPED, State.ERROR)), *await self._ended_here()]:
            if record.workspace_path is not None:
                continue  # its files are not carrel's to delete
            try:
                await self._look(record, self._ttl_s)
            except CarrelError as error:  # a failure must not stop the others
                log.warning("the workspace of %s could not be deleted: %s", record.owner, error)

    async def mark_kept(self, infos: Sequence[SandboxInfo]) -> None:
        """Mark terminated sessions whose files are still here: only the last session of a context has them."""
        ended = [info for info in infos if info.state is State.TERMINATED]
        here = set(await self._workspaces.contexts()) if ended else set()
        for info in ended:
            newest = None
            if info.context_id is not None and info.context_id in here:
                newest = await self._store.newest_of_context(info.context_id)
            info.files_kept = newest is not None and newest.id == info.id

    async def _ended_here(self) -> list[SessionRecord]:
        """Return the last sessions of contexts that were terminated and have files here."""
        found = []
        for context in await self._workspaces.contexts():
            newest = await self._store.newest_of_context(context)
            if newest is not None and newest.state is State.TERMINATED:
                found.append(newest)
        return found

    async def _leave_moved(self) -> None:
        """Remove the files of contexts that moved to another server."""
        for context in await self._workspaces.contexts():
            newest = await self._store.newest_of_context(context)
            if newest is not None and newest.node not in {None, self._workspaces.node}:
                await self._workspaces.leave(context)

    async def recall(self) -> None:
        """Report workspaces without a sandbox to the metrics, as after a restart. Measures those that were never
        measured.
        """
        stopped = await self._store.in_states((State.STOPPED, State.ERROR))
        for record in [*stopped, *await self._ended_here()]:
            context, used = record.context_id, record.used_bytes
            if context is None or record.node not in {None, self._workspaces.node}:
                continue
            if used is None and record.workspace_path is None and await self._workspaces.exists(context):
                used = await self._workspaces.usage(record)
                await self._store.update(record.id, used_bytes=used)
            if used is not None and self._sessions.find_live(context) is None:
                self._workspaces.report(record, used, record.last_activity_at)

    async def _look(self, record: SessionRecord, ttl_s: float) -> None:
        now = time.time()
        here = record.node in {
            None,
            self._workspaces.node,
        }  # else its own server deletes it, unless that is gone for good
        due = record.last_activity_at + ttl_s + (0.0 if here else GONE_FOR_GOOD_S)
        ahead = warning_s(ttl_s)
        if now < due - ahead or record.context_id is None:
            if record.expires_at is not None:  # it was used, or is kept for longer now
                await self._store.update(record.id, expires_at=None)
        elif record.expires_at is None:
            if not await self._workspaces.expired(record.context_id):
                await self._warn(record, max(due, now + ahead), ttl_s)
        elif now >= max(due, record.expires_at) and await self._sessions.expire(record, now - ttl_s):
            log.info("the workspace of %s was not used for long and is deleted", record.context_id)
            await self._record(record, "expire_workspace", {"unused_days": round(ttl_s / DAY_S, 3)})

    async def _warn(self, record: SessionRecord, when: float, ttl_s: float) -> None:
        moment = datetime.fromtimestamp(when, UTC).isoformat(timespec="seconds")
        log.warning("the workspace of %s is deleted at %s unless it is used before", record.context_id, moment)
        await self._record(record, "warn_of_deletion", {"expires_at": moment, "unused_days": round(ttl_s / DAY_S, 3)})
        await self._store.update(record.id, expires_at=when)

    async def _record(self, record: SessionRecord, name: str, arguments: dict[str, object]) -> None:
        entry = AuditEntry(chain_of(record.context_id, record.id), "carrel", "session", name, arguments=arguments)
        (await self._audit.begin(entry)).end()
