"""Syncs a workspace with its filespace: pulls before a sandbox starts, pushes after operations and at a stop.

Connects the sync engine with records and the storage of the archive. Callers have been admitted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from carrel.control.secrets.values import SecretValues
from carrel.control.sessions.attachments import Attachment, LaunchPlan
from carrel.control.sessions.live import SessionNotes
from carrel.control.workspaces.filespace_bases import FilespaceBases
from carrel.control.workspaces.workspaces import Workspaces, cap_bytes
from carrel.errors import ArchiveUnavailable, CarrelError, LimitExceeded, PlatformError
from carrel.metrics import OK, outcome_of
from carrel.models import SyncDirection, SyncSummary
from carrel.store import FilespaceChange, FilespaceEntry, FilespaceMark, FilespaceStore, SessionRecord
from carrel.threads import run_to_end
from carrel.workspaces.filespace_contents import Contents
from carrel.workspaces.filespace_sync import TOMBSTONE_S, FilespaceSync, Mark, StoredBatch, SyncChange, Synced
from carrel.workspaces.layout import encode
from carrel.workspaces.remote import Remote
from carrel.workspaces.synced_tree import MOST_FILES

log = logging.getLogger("carrel.filespaces")

NOTICE = "the filespace could not be synced: "
"""How the notice of a session begins if its sync failed."""
MOST_CONFLICTS = 100
_PAGE = 1000

T = TypeVar("T")


class _Entries:
    """The entries of a context for use in a thread: queries run on the event loop."""

    def __init__(self, store: FilespaceStore, context: str, loop: asyncio.AbstractEventLoop):
        self._store = store
        self._context = context
        self._loop = loop

    def newest(self) -> tuple[int, float]:
        return self._ask(self._store.newest(self._context))

    def changed(self, after: int) -> list[FilespaceEntry]:
        found: list[FilespaceEntry] = []
        while len(page := self._ask(self._store.changed(self._context, after=after, limit=_PAGE))) == _PAGE:
            found += page
            after = page[-1].version
            if len(found) > 2 * MOST_FILES:
                raise LimitExceeded(
                    f"the filespace has more than {MOST_FILES} files", field="files", hint="delete some of them"
                )
        return found + page

    def put(self, changes: Sequence[SyncChange], mark: Mark) -> StoredBatch:
        wanted = [FilespaceChange(*change) for change in changes]
        done = self._ask(self._store.put(self._context, wanted, FilespaceMark(*mark)))
        return StoredBatch(done.entries, done.before, done.newest)

    def hashes(self) -> set[str]:
        return self._ask(self._store.hashes(self._context))

    def _ask(self, query: Coroutine[object, object, T]) -> T:
        return asyncio.run_coroutine_threadsafe(query, self._loop).result()


class FilespaceFiles(Attachment):
    """The filespaces of every context, for their workspaces. `spool` is a directory for files in transfer; a process
    that is `alone` empties it.
    """

    def __init__(
        self,
        workspaces: Workspaces,
        store: FilespaceStore,
        remote: Remote,
        bases: FilespaceBases,
        spool: str,
        notes: SessionNotes,
        secrets: SecretValues,
        *,
        alone: bool,
    ):
        self._workspaces = workspaces
        self._store = store
        self._remote = remote
        self._bases = bases
        self._spool = spool
        self._notes = notes
        self._secrets = secrets
        try:
            os.makedirs(spool, 0o700, exist_ok=True)
            for name in os.listdir(spool) if alone else ():  # a killed server may have left some
                os.unlink(os.path.join(spool, name))
        except OSError as error:
            raise PlatformError(f"filespaces cannot be used: {error.strerror}", field="data_dir") from None

    async def prepare(self, plan: LaunchPlan, workspace: str) -> LaunchPlan:
        """Pull the changes of the filespace. When its storage cannot be reached, a notice says so."""
        if not plan.record.filespace:
            return plan
        try:
            await self.sync(plan.record, workspace, SyncDirection.PULL)
        except ArchiveUnavailable as error:
            return replace(plan, notice=f"{NOTICE}{error.detail}"[:2000])
        return plan

    async def save(self, record: SessionRecord, workspace: str) -> None:
        """Push the changes of the workspace."""
        if record.filespace:
            await self.sync(record, workspace, SyncDirection.PUSH)

    async def sync(
        self, record: SessionRecord, path: str, direction: SyncDirection, hidden: Callable[[str], bool] | None = None
    ) -> SyncSummary:
        """Sync a workspace with its filespace. Tries twice; a failure is also written into the notice of the session. A
        file whose path is `hidden` from the sandbox is not replaced.
        """
        context = record.context_id or ""
        began = time.monotonic()
        outcome = OK
        try:
            async with self._workspaces.keeping.still(context):
                try:
                    done = await self._attempt(context, path, direction, cap_bytes(record), hidden)
                except PlatformError as error:
                    log.info("the sync of context '%s' is tried again: %s", context, error.code)
                    done = await self._attempt(context, path, direction, cap_bytes(record), hidden)
        except BaseException as error:
            outcome = outcome_of(error)
            if isinstance(error, CarrelError):
                await self._secrets.clean_error(context, error)  # it may contain the name of a file
                with suppress(CarrelError):  # the first failure says more than a failure to write the notice
                    await self._notes.write(record, notice=f"{NOTICE}{error.detail}"[:2000])
            raise
        finally:
            self._workspaces.metrics.synced(direction, outcome, time.monotonic() - began)
        if record.notice is not None and record.notice.startswith(NOTICE):
            await self._notes.write(record, notice=None)
        return _summary(direction, done, time.monotonic() - began)

    async def _attempt(
        self, context: str, path: str, direction: SyncDirection, cap: int | None, hidden: Callable[[str], bool] | None
    ) -> Synced:
        entries = _Entries(self._store, context, asyncio.get_running_loop())
        engine = FilespaceSync(path, self._bases.path(context), entries, self.contents(context), hidden=hidden)
        return await run_to_end(lambda: engine.run(direction, cap), stop=engine.stop)

    async def collect(self, context: str) -> int:
        """Remove contents without a file, and old records of deletions; return how many contents."""
        entries = _Entries(self._store, context, asyncio.get_running_loop())
        async with self._workspaces.keeping.still(context):
            await self._store.forget_tombstones(context, TOMBSTONE_S)
            return await run_to_end(lambda: self.contents(context).collect(entries.hashes))

    async def holds(self, context: str) -> bool:
        """Whether a filespace has any file."""
        return bool((await self._store.page(context, limit=1))[0])

    async def erase(self, context: str) -> None:
        """Delete a filespace with everything in it."""
        contents = self.contents(context)
        async with self._workspaces.keeping.still(context):
            await self._store.forget(context)
            await self._bases.forget(context)
            await run_to_end(contents.forget)

    def contents(self, context: str) -> Contents:
        """Return the stored contents of a filespace."""
        return Contents(self._remote, encode(context, ephemeral=False), self._spool)


def _summary(direction: SyncDirection, done: Synced, seconds: float) -> SyncSummary:
    return SyncSummary(
        direction=direction,
        pushed=done.pushed,
        pushed_bytes=done.pushed_bytes,
        push_deleted=done.push_deleted,
        pulled=done.pulled,
        pulled_bytes=done.pulled_bytes,
        pull_deleted=done.pull_deleted,
        conflicts=done.conflicts[:MOST_CONFLICTS],
        skipped=done.skipped,
        duration_ms=seconds * 1000,
    )
