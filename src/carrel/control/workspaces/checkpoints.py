"""Checkpoints of folder workspaces: taken around each run by an attachment, and on request.

Operations of callers pass admission.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from datetime import UTC, datetime

from carrel.audit import AuditEntry, AuditLog, chain_of
from carrel.control.operations.caller import Caller, OwnWork
from carrel.control.operations.operations import Operations
from carrel.control.sessions.attachments import Attachment, LaunchPlan
from carrel.control.sessions.sessions import Sessions
from carrel.errors import CarrelError, InvalidRequest, Unsupported
from carrel.models import (
    CheckpointInfo,
    CheckpointList,
    FolderChange,
    FolderChanges,
    FolderPatch,
    LeftChange,
    UndoneChange,
    UndoResult,
)
from carrel.models import operations as op
from carrel.store import SessionRecord
from carrel.threads import run_to_end
from carrel.workspaces.checkpoints import Checkpoint, CheckpointKind, CheckpointStore
from carrel.workspaces.undoing import Difference
from carrel.workspaces.volumes.base import ChangeKind
from carrel.workspaces.volumes.trees import EntryKind, Node

log = logging.getLogger("carrel.checkpoints")

MOST_CHANGES = 10_000
_MOST_OMITTED = 1000
_MOST_CLEARED = 100
_TYPES = {EntryKind.FILE: "file", EntryKind.DIRECTORY: "directory", EntryKind.LINK: "link"}


class RunCheckpoints(Attachment):
    """Records a folder before a sandbox starts on it, and when the sandbox has ended."""

    def __init__(self, store: CheckpointStore, audit: AuditLog, *, enabled: bool, keep_runs: int, max_bytes: int):
        self._store = store
        self._audit = audit
        self._enabled = enabled
        self._keep_runs = keep_runs
        self._max_bytes = max_bytes

    async def prepare(self, plan: LaunchPlan, workspace: str) -> LaunchPlan:
        """Record the folder. Without the record the agent's work could not be undone, so a failure ends the start."""
        context, folder = plan.record.context_id, plan.record.workspace_path
        if self._enabled and context is not None and folder is not None:
            await run_to_end(lambda: self._store.take(context, folder, CheckpointKind.START))
        return plan

    async def save(self, record: SessionRecord, workspace: str) -> None:
        """Record the folder as the sandbox left it, and drop the oldest runs."""
        context, folder = record.context_id, record.workspace_path
        if not self._enabled or context is None or folder is None:
            return
        try:
            cleared = await run_to_end(lambda: self._end(context, folder))
        except CarrelError as error:  # the session ends anyway; an undo compares with the folder of then
            log.warning("the folder of context '%s' was not recorded at the end of its run: %s", context, error)
            return
        for path in cleared[:_MOST_CLEARED]:
            log.warning("sandbox %s: the changed file %s had set-id bits, which were removed", record.id, path)
            chain, arguments = chain_of(context, record.id), {"path": path}
            entry = AuditEntry(chain, "carrel", "file", "clear_set_ids", decision="deny", arguments=arguments)
            (await self._audit.begin(entry)).end()

    def _end(self, context: str, folder: str) -> list[str]:
        """Record the end of the run; return the files whose set-id bits were removed."""
        starts = [each for each in self._store.all_of(context) if each.kind is CheckpointKind.START]
        cleared: list[str] = []
        if starts and starts[-1].folder == folder and self._store.end_of(starts[-1]) is None:
            start = starts[-1]
            end = self._store.take(context, folder, CheckpointKind.END, begin=start.id)
            cleared = self._store.clear_set_ids(start, end)
            if cleared:  # the newest end of a run counts
                self._store.take(context, folder, CheckpointKind.END, begin=start.id)
        self._store.prune(context, self._keep_runs)
        return cleared

    async def forget(self, caller: Caller | OwnWork, context_id: str) -> None:
        """Delete the checkpoints of a context."""
        await asyncio.to_thread(self._store.forget, context_id)

    async def shrink(self) -> None:
        """Free the space of removed checkpoints, and remove the oldest while all take too much space."""
        await run_to_end(self._shrink)

    def _shrink(self) -> None:
        self._store.collect_garbage()
        removed = self._store.shrink(self._max_bytes)
        if removed:
            log.info("%d old checkpoints were removed: they took more than %d bytes", removed, self._max_bytes)


class CheckpointOperations:
    """The checkpoints of every folder context, for callers."""

    def __init__(self, sessions: Sessions, operations: Operations, store: CheckpointStore):
        self._sessions = sessions
        self._operations = operations
        self._store = store

    async def list(self, caller: Caller, context: str) -> CheckpointList:
        """List the checkpoints of a context, newest first."""
        async with self._operations.admit(caller, op.LIST_CHECKPOINTS, {}, context_id=context):
            found = await asyncio.to_thread(self._store.all_of, context)
            return CheckpointList(items=[_info(each) for each in reversed(found)])

    async def take(self, caller: Caller, context: str, reason: str) -> CheckpointInfo:
        """Record the folder of a context now; its sandbox may run meanwhile."""
        record = await self._sessions.record(context)
        folder = record.workspace_path
        async with self._operations.admit(caller, op.TAKE_CHECKPOINT, {"reason": reason}, record.id, context):
            if folder is None:
                raise Unsupported(
                    "the workspace of this context is not a folder of the host",
                    field="context_id",
                    hint="take a snapshot instead",
                )
            await self._sessions.require_here(record)
            kind = CheckpointKind.REQUEST
            return _info(await run_to_end(lambda: self._store.take(context, folder, kind, reason=reason)))

    async def changes(self, caller: Caller, context: str, before: str, after: str | None) -> FolderChanges:
        """Return the changes from a checkpoint to another one, or to now."""
        async with self._operations.admit(
            caller, op.COMPARE_CHECKPOINTS, {"before": before, "after": after}, context_id=context
        ):
            first, second = await self._pair(context, before, after)
            found = await run_to_end(lambda: self._store.changes(first, second))
            return FolderChanges(
                before=before,
                after=after,
                items=[_change(each) for each in found.items[:MOST_CHANGES]],
                added=found.counts[ChangeKind.ADDED],
                removed=found.counts[ChangeKind.REMOVED],
                changed=found.counts[ChangeKind.CHANGED],
                truncated=found.truncated or len(found.items) > MOST_CHANGES,
            )

    async def patch(
        self, caller: Caller, context: str, before: str, after: str | None, path: str | None
    ) -> FolderPatch:
        """Return the changes of text files line by line."""
        # It shows the content of files, also of those that the agent of the context may not read.
        row = op.PATCH_BY_ADMINISTRATOR if caller.administers else op.PATCH_CHECKPOINTS
        arguments = {"path": "", "before": before, "after": after}
        async with self._operations.admit(caller, row, arguments, context_id=context) as traffic:
            first, second = await self._pair(context, before, after)
            chosen = [] if path is None else [_relative(path)]
            made = await run_to_end(lambda: self._store.patch(first, second, chosen))
            text = "".join(made.texts)
            traffic.count_out(len(text))
            omitted = [os.fsdecode(each) for each in made.omitted[:_MOST_OMITTED]]
            cut = made.truncated or len(made.omitted) > _MOST_OMITTED
            return FolderPatch(text=text, omitted=omitted, truncated=cut)

    async def undo(
        self, caller: Caller, context: str, start: str, paths: Sequence[str] | None, *, dry_run: bool
    ) -> UndoResult:
        """Undo the changes of the run that a checkpoint begins; without an end, all changes since."""
        arguments = {"checkpoint_id": start, "paths": list(paths or []), "dry_run": dry_run}
        async with self._operations.admit(caller, op.UNDO_CHECKPOINT, arguments, context_id=context):
            first = await asyncio.to_thread(self._store.get, context, start)
            chosen = None if paths is None else [_relative(each) for each in paths]

            def work() -> UndoResult:
                end = self._store.end_of(first)
                done, before = self._store.undo(first, end, chosen, dry_run=dry_run)
                return UndoResult(
                    undone=[
                        UndoneChange(path=os.fsdecode(step.path) or ".", action=step.action.value)
                        for step in done.steps[:MOST_CHANGES]
                    ],
                    undone_count=len(done.steps),
                    left=[
                        LeftChange(path=os.fsdecode(each.path) or ".", reason=str(each.reason))
                        for each in done.left[:MOST_CHANGES]
                    ],
                    left_count=len(done.left),
                    dry_run=dry_run,
                    checkpoint_id=None if before is None else before.id,
                )

            return await run_to_end(work)

    async def _pair(self, context: str, before: str, after: str | None) -> tuple[Checkpoint, Checkpoint | None]:
        first = await asyncio.to_thread(self._store.get, context, before)
        second = None if after is None else await asyncio.to_thread(self._store.get, context, after)
        if second is not None and second.folder != first.folder:
            raise InvalidRequest(
                "the checkpoints are of different folders", field="after", hint="compare checkpoints of one folder"
            )
        return first, second


def _relative(path: str) -> bytes:
    """Check a path below the folder, and return it as it is recorded."""
    plain = os.path.normpath(path)
    if path.startswith("/") or plain == "." or plain.split("/")[0] == "..":
        raise InvalidRequest(
            f"{path[:200]!r} is not a path below the folder", field="paths", hint="give relative paths"
        )
    return os.fsencode(plain)


def _info(found: Checkpoint) -> CheckpointInfo:
    return CheckpointInfo(
        id=found.id,
        context_id=found.context_id,
        workspace_path=found.folder,
        kind=found.kind.value,
        reason=found.reason,
        created_at=datetime.fromtimestamp(found.created_at, UTC),
        begin=found.begin,
        files=found.files,
        bytes=found.bytes,
        new_bytes=found.new_bytes,
        ignored=list(found.ignored),
        ignored_count=found.ignored_count,
        left_out=list(found.left_out),
        left_out_count=found.left_out_count,
    )


def _change(found: Difference) -> FolderChange:
    return FolderChange.model_validate(
        {"path": os.fsdecode(found.path), "kind": found.kind.value}
        | _state("before", found.before)
        | _state("after", found.after)
    )


def _state(when: str, node: Node | None) -> dict[str, object]:
    if node is None:
        return {}
    state: dict[str, object] = {f"type_{when}": _TYPES[node.kind]}
    if node.kind is EntryKind.FILE:
        state[f"bytes_{when}"] = node.size
    if node.kind is not EntryKind.LINK and node.mode:
        state[f"mode_{when}"] = f"{node.mode:o}"
    return state
