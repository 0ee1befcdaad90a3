"""Snapshots of workspaces: take, list, restore, fork, compare, export. Binds a volume driver to sessions and records.

Only workspaces of a context have snapshots: an ephemeral sandbox keeps nothing. What is recorded as ready is whole;
what a killed server left half made is found at the next start.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime

from carrel.control.operations import Operations
from carrel.control.sessions import Sessions
from carrel.errors import AlreadyExists, CarrelError, Conflict, NotFound
from carrel.models import FileChange, FileChanges, SandboxInfo, SandboxRequest, SnapshotInfo, SnapshotPage
from carrel.store import SessionRecord
from carrel.store.snapshots import SnapshotRecord, SnapshotStatus, SnapshotStore
from carrel.workspaces.layout import Layout
from carrel.workspaces.volumes import VolumeDriver

log = logging.getLogger("carrel.snapshots")

MOST_CHANGES = 10_000


class Snapshots:
    """The snapshots of every context of this server."""

    def __init__(
        self, sessions: Sessions, operations: Operations, store: SnapshotStore, layout: Layout, driver: VolumeDriver
    ):
        self._sessions = sessions
        self._operations = operations
        self._store = store
        self._layout = layout
        self._driver = driver

    async def take(self, name: str, actor: str = "") -> SnapshotInfo:
        """Take a snapshot now; a running sandbox goes on meanwhile."""
        with self._operations.session_door("snapshot", {}, actor, name):
            record, context = await self._durable(name)
            return await self._take(record, context)

    async def _take(self, session: SessionRecord, context: str) -> SnapshotInfo:
        last = await self._store.newest_ready(context)
        parent = last.id if last else None
        name = f"snap-{secrets.token_hex(8)}"
        made = SnapshotRecord(name, context, self._driver.name, time.time(), session_id=session.id, parent=parent)
        await self._store.insert(made)
        try:
            facts = await asyncio.to_thread(self._driver.snapshot, self._volume(context), name, parent)
        except BaseException as error:
            words = error.detail if isinstance(error, CarrelError) else "it was broken off"
            await self._store.failed(name, words[:2000])
            raise
        await self._store.ready(name, size=facts.bytes, new_bytes=facts.new_bytes, files=facts.files)
        return _info(await self._known(name, context))

    async def page(self, name: str, *, limit: int = 100, cursor: str | None = None, actor: str = "") -> SnapshotPage:
        """The snapshots of a context, newest first."""
        with self._operations.session_door("list_snapshots", {}, actor, name):
            _, context = await self._durable(name)
            records, following = await self._store.page(context, limit=limit, cursor=cursor)
            return SnapshotPage(items=[_info(record) for record in records], next=following)

    async def restore(self, name: str, snapshot_id: str, actor: str = "") -> SandboxInfo:
        """Give the workspace the snapshot's files. A running sandbox is stopped for it and started again."""
        with self._operations.session_door("restore", {"snapshot_id": snapshot_id}, actor, name):
            record, context = await self._durable(name)
            snapshot = await self._ready(snapshot_id, context)
            async with self._sessions.stopped(record) as ran:
                await asyncio.to_thread(self._driver.restore, self._volume(context), snapshot.id)
            if ran:
                return (await self._sessions.deploy_or_resume(SandboxRequest(context_id=context)))[0]
            return await self._sessions.get(record.id)

    async def fork(self, name: str, context_id: str, snapshot_id: str | None = None, actor: str = "") -> SandboxInfo:
        """A new context with the same files and settings, under an identity of its own, started at once."""
        arguments = {"context_id": context_id, "snapshot_id": snapshot_id}
        with self._operations.session_door("fork", arguments, actor, name):
            record, context = await self._durable(name)
            if snapshot_id is None:
                snapshot_id = (await self._take(record, context)).id
            snapshot = await self._ready(snapshot_id, context)
            volume = self._volume(context_id)
            if await asyncio.to_thread(self._driver.exists, volume):
                raise AlreadyExists(
                    f"context '{context_id}' has a workspace already", field="context_id", hint="fork to a new context"
                )
            cap = record.limits.disk_mb and record.limits.disk_mb * 1024 * 1024
            await asyncio.to_thread(self._driver.fork, snapshot.id, volume, cap)
            request = SandboxRequest(
                context_id=context_id, provider=record.provider, trust=record.trust, network=record.network,
                limits=record.limits, env=dict(record.env), labels=dict(record.labels),
            )  # fmt: skip
            try:
                return (await self._sessions.deploy_or_resume(request))[0]
            except BaseException:
                await asyncio.to_thread(self._driver.delete_volume, volume)
                raise

    async def diff(self, name: str, before: str, after: str, actor: str = "") -> FileChanges:
        """What leads from one snapshot to the other."""
        with self._operations.session_door("diff", {"before": before, "after": after}, actor, name):
            _, context = await self._durable(name)
            first, second = await self._ready(before, context), await self._ready(after, context)
            changes = await asyncio.to_thread(self._driver.diff, first.id, second.id)
            items = [
                FileChange.model_validate(
                    {"path": change.path.decode(errors="surrogateescape"), "kind": change.kind.value}
                )
                for change in changes[:MOST_CHANGES]
            ]
            return FileChanges(items=items, truncated=len(changes) > MOST_CHANGES)

    async def export(self, name: str, snapshot_id: str, actor: str = "") -> AsyncIterator[bytes]:
        """The snapshot as a tar stream."""
        with self._operations.session_door("export", {"snapshot_id": snapshot_id}, actor, name):
            _, context = await self._durable(name)
            snapshot = await self._ready(snapshot_id, context)
        return _in_thread(lambda: self._driver.export_tar(snapshot.id))

    async def delete(self, name: str, snapshot_id: str, actor: str = "") -> None:
        """Delete a snapshot for good."""
        with self._operations.session_door("delete_snapshot", {"snapshot_id": snapshot_id}, actor, name):
            _, context = await self._durable(name)
            record = await self._known(snapshot_id, context)
            await self._drop(record)

    async def forget(self, context: str) -> None:
        """The workspace of a context was deleted: so are its snapshots."""
        while records := (await self._store.page(context, limit=100))[0]:
            for record in records:
                await self._drop(record)

    async def recover(self) -> None:
        """After a restart: a snapshot that was being made is whole, or it failed."""
        await asyncio.to_thread(self._driver.open)
        whole = set(await asyncio.to_thread(self._driver.snapshots))
        for record in await self._store.in_status(SnapshotStatus.CREATING):
            if record.id in whole:
                facts = await asyncio.to_thread(self._driver.facts, record.id)
                await self._store.ready(record.id, size=facts.bytes, new_bytes=facts.new_bytes, files=facts.files)
            else:
                await self._store.failed(record.id, "the server ended while it was made")

    async def _drop(self, record: SnapshotRecord) -> None:
        await asyncio.to_thread(self._driver.delete_snapshot, record.id)
        await self._store.delete(record.id)

    async def _durable(self, name: str) -> tuple[SessionRecord, str]:
        record = await self._sessions.record(name)
        if record.context_id is None:
            raise Conflict(
                "an ephemeral sandbox keeps nothing, so it has no snapshots",
                field="id",
                hint="make the sandbox with a context_id",
            )
        return record, record.context_id

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

    def _volume(self, context: str) -> str:
        return os.path.basename(self._layout.path(context, ephemeral=False))


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
    )


async def _in_thread(start: Callable[[], Iterator[bytes]]) -> AsyncIterator[bytes]:
    chunks = await asyncio.to_thread(start)
    try:
        while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
            yield chunk
    finally:
        close: Callable[[], object] | None = getattr(chunks, "close", None)
        if close is not None:
            await asyncio.to_thread(close)
