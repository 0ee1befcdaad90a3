"""Operations on snapshots: take, list, restore, fork, compare, export, delete. Each passes admission.

Only workspaces of a context have snapshots: an ephemeral sandbox keeps nothing. A snapshot recorded as ready is
complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from datetime import UTC, datetime

from carrel.control.operations.caller import OWN_WORK, Caller
from carrel.control.operations.operations import Operations
from carrel.control.sessions.attachments import Attachments, Fork
from carrel.control.sessions.live import SessionNotes
from carrel.control.sessions.sessions import Sessions
from carrel.control.workspaces.snapshot_keeping import context_of
from carrel.control.workspaces.workspaces import Workspaces, cap_bytes, refuse_folder
from carrel.errors import Conflict, NotFound
from carrel.models import FileChange, FileChanges, SandboxInfo, SandboxRequest, SnapshotInfo, SnapshotPage
from carrel.models import operations as op
from carrel.store import SessionRecord
from carrel.store.snapshots import SnapshotRecord, SnapshotStatus, SnapshotStore

MOST_CHANGES = 10_000


class Snapshots:
    """The snapshots of every context of this server."""

    def __init__(
        self,
        sessions: Sessions,
        operations: Operations,
        store: SnapshotStore,
        workspaces: Workspaces,
        attachments: Attachments,
        notes: SessionNotes,
    ):
        self._sessions = sessions
        self._operations = operations
        self._store = store
        self._workspaces = workspaces
        self._attachments = attachments
        self._notes = notes

    async def take(self, caller: Caller, name: str) -> SnapshotInfo:
        """Take a snapshot; a running sandbox continues meanwhile. It is archived in the background."""
        record, context = await self._durable(name)
        async with self._operations.admit(caller, op.TAKE_SNAPSHOT, {}, record.id, context):
            await self._sessions.require_here(record)
            return _info(await self._take(record, "request"))

    async def _take(self, record: SessionRecord, reason: str) -> SnapshotRecord:
        if not await self._workspaces.exists(context_of(record)):
            why = f": {record.error}" if record.error else ""
            raise Conflict(
                f"the context '{record.context_id}' has no files on this server{why}",
                field="id",
                hint="start its sandbox first",
            )
        taken = await self._workspaces.keeping.take(record, reason)
        await self._notes.write(record, snapshot=taken.id)
        return taken

    async def checkpoint(self, record: SessionRecord) -> None:
        """Take a snapshot and archive it."""
        taken = await self._take(record, "checkpoint")
        await self._notes.write(record, notice=await self._workspaces.keeping.archive_and_prune(taken))

    async def page(self, caller: Caller, name: str, *, limit: int = 100, cursor: str | None = None) -> SnapshotPage:
        """List the snapshots of a context, newest first."""
        record, context = await self._durable(name)
        async with self._operations.admit(caller, op.LIST_SNAPSHOTS, {}, record.id, context):
            records, following = await self._store.page(context, limit=limit, cursor=cursor)
            return SnapshotPage(items=[_info(record) for record in records], next=following)

    async def restore(self, caller: Caller, name: str, snapshot_id: str) -> SandboxInfo:
        """Replace the files of a workspace by those of a snapshot. A running sandbox is stopped for it and started
        again.
        """
        record, context = await self._durable(name)
        async with self._operations.admit(caller, op.RESTORE, {"snapshot_id": snapshot_id}, record.id, context):
            async with self._workspaces.keeping.using(
                snapshot_id
            ):  # the stop takes another snapshot, which may prune this one
                snapshot = await self._ready(snapshot_id, context)
                async with self._sessions.stopped(record) as (held, ran):
                    await self._workspaces.restore(held, snapshot)
            if ran:
                return (await self._sessions.deploy_or_resume(caller, SandboxRequest(context_id=context)))[0]
            return await self._sessions.get(record.id)

    async def fork(
        self, caller: Caller, name: str, context_id: str, snapshot_id: str | None = None, *, secrets: bool = True
    ) -> SandboxInfo:
        """Make a new context with the same files and settings, and start it. It gets the secrets too unless `secrets`
        is False.
        """
        record, context = await self._durable(name)
        arguments = {"context_id": context_id, "snapshot_id": snapshot_id, "secrets": secrets}
        async with self._operations.admit(caller, op.FORK, arguments, record.id, context):
            if snapshot_id is None:
                await self._sessions.require_here(record)
                snapshot_id = (await self._take(record, "fork")).id
            async with self._sessions.lock(f"fork {context_id}"), self._workspaces.keeping.using(snapshot_id):
                snapshot = await self._ready(snapshot_id, context)
                await self._sessions.require_unused(context_id)
                fork = Fork(caller, context, context_id, with_secrets=secrets)
                async with fork.finished:
                    await self._attachments.fork(fork)
                    try:
                        return await self._fork(caller, snapshot, record, context_id)
                    except BaseException:
                        if not any(box.record.context_id == context_id for box in self._sessions.live()):
                            await self._unmake(context_id)
                            await fork.undo.aclose()
                        raise

    async def _fork(
        self, caller: Caller, snapshot: SnapshotRecord, record: SessionRecord, context_id: str
    ) -> SandboxInfo:
        await self._workspaces.fork(snapshot, context_id, cap_bytes(record))
        request = SandboxRequest(
            context_id=context_id, provider=record.provider, trust=record.trust, network=record.network,
            limits=record.limits, env=dict(record.env), labels=dict(record.labels), filespace=record.filespace,
            template=record.template,
        )  # fmt: skip
        return (await self._sessions.deploy_or_resume(caller, request))[0]

    async def _unmake(self, context_id: str) -> None:
        """Remove everything of a failed fork but the record of its end. Things that its context had before, such as
        secrets, stay.
        """
        with suppress(NotFound):
            await self._sessions.terminate(OWN_WORK, context_id, "the fork could not be made", snapshot=False)
        await self._workspaces.forget(context_id)

    async def diff(self, caller: Caller, name: str, before: str, after: str) -> FileChanges:
        """Return the changes between two snapshots."""
        record, context = await self._durable(name)
        async with self._operations.admit(
            caller, op.DIFF_SNAPSHOTS, {"before": before, "after": after}, record.id, context
        ):
            async with self._workspaces.keeping.using(before, after):
                first, second = await self._ready(before, context), await self._ready(after, context)
                changes = await asyncio.to_thread(self._workspaces.stored.diff, first, second)
            items = [
                FileChange.model_validate(
                    {"path": change.path.decode(errors="surrogateescape"), "kind": change.kind.value}
                )
                for change in changes[:MOST_CHANGES]
            ]
            return FileChanges(items=items, truncated=len(changes) > MOST_CHANGES)

    async def export(self, caller: Caller, name: str, snapshot_id: str) -> AsyncIterator[bytes]:
        """Return a snapshot as a tar stream. The first piece is read at once, so that a damaged snapshot is an error
        and not a broken stream.
        """
        record, context = await self._durable(name)
        pieces = self._exported(caller, record, context, snapshot_id)
        await anext(pieces)
        return pieces

    async def _exported(
        self, caller: Caller, record: SessionRecord, context: str, snapshot_id: str
    ) -> AsyncIterator[bytes]:
        """Yield an empty piece as soon as the first one can be read, then all pieces."""
        arguments = {"snapshot_id": snapshot_id}
        # A snapshot contains every file, also those that the agent of the context may not read.
        row = op.EXPORT_BY_ADMINISTRATOR if caller.administers else op.EXPORT
        admitted = self._operations.admit(caller, row, arguments, record.id, context)
        async with admitted as traffic, self._workspaces.keeping.using(snapshot_id):
            snapshot = await self._ready(snapshot_id, context)
            chunks = self._workspaces.stored.tar(snapshot)
            try:
                chunk = await asyncio.to_thread(next, chunks, None)
                yield b""
                while chunk is not None:
                    traffic.count_out(len(chunk))
                    yield chunk
                    chunk = await asyncio.to_thread(next, chunks, None)
            finally:
                close: Callable[[], object] | None = getattr(chunks, "close", None)
                if close is not None:
                    await asyncio.to_thread(close)

    async def delete(self, caller: Caller, name: str, snapshot_id: str) -> None:
        record, context = await self._durable(name)
        arguments = {"snapshot_id": snapshot_id}
        async with self._operations.admit(caller, op.DELETE_SNAPSHOT, arguments, record.id, context):
            await self._workspaces.keeping.drop(await self._known(snapshot_id, context))

    async def _durable(self, name: str) -> tuple[SessionRecord, str]:
        """Return a session whose workspace can have snapshots."""
        record = await self._sessions.record(name)
        refuse_folder(record, "it has no snapshots and cannot be forked")
        return record, context_of(record)

    async def _known(self, snapshot_id: str, context: str) -> SnapshotRecord:
        record = await self._store.get(snapshot_id)
        if record is None or record.context_id != context:
            raise NotFound(
                f"context '{context}' has no snapshot '{snapshot_id[:64]}'", field="snapshot_id", hint="list them first"
            )
        return record

    async def _ready(self, snapshot_id: str, context: str) -> SnapshotRecord:
        record = await self._known(snapshot_id, context)
        if record.status is not SnapshotStatus.READY:
            raise Conflict(
                f"snapshot '{record.id}' is {record.status}", field="snapshot_id", hint="choose one that is ready"
            )
        return record


def _info(record: SnapshotRecord) -> SnapshotInfo:
    return SnapshotInfo(
        id=record.id,
        context_id=record.context_id,
        status=record.status.value,
        created_at=datetime.fromtimestamp(record.created_at, UTC),
        parent=record.parent,
        bytes=record.bytes,
        new_bytes=record.new_bytes if record.new_bytes != -1 else None,
        files=record.files if record.files != -1 else None,
        error=record.error,
        reason=record.reason,  # type: ignore[arg-type]  # checked by the model
        archived=record.archived,
    )
