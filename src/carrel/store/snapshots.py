"""The queries on snapshots. Knows neither volume drivers nor the archive."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from sqlalchemy import Select, delete, func, insert, select, update
from sqlalchemy.engine import Connection, RowMapping
from sqlalchemy.exc import IntegrityError

from carrel.errors import AlreadyExists, Conflict
from carrel.models.events import EventDraft, EventKind, body_of
from carrel.store.clock import moment_after
from carrel.store.cursors import read_page
from carrel.store.database import Database
from carrel.store.events import stage
from carrel.store.tables import snapshots

DELETING = "it is being deleted"
"""The error of a snapshot whose deletion has begun."""


class SnapshotStatus(StrEnum):
    """The state of a snapshot: only a ready one may be restored."""

    CREATING = "creating"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """A row of the table of snapshots. The sizes are set once it is ready."""

    id: str
    context_id: str
    driver: str
    created_at: float
    session_id: str | None = None
    parent: str | None = None
    status: SnapshotStatus = SnapshotStatus.CREATING
    bytes: int | None = None
    new_bytes: int | None = None
    files: int | None = None
    error: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    node: str | None = None
    reason: str = "request"
    archived: bool = False


def _record(row: RowMapping) -> SnapshotRecord:
    return SnapshotRecord(**{**row, "status": SnapshotStatus(row["status"])})


class SnapshotStore:
    """Reads and writes snapshot records."""

    def __init__(self, database: Database):
        self._database = database

    async def insert(self, record: SnapshotRecord) -> None:
        """Add a record as the newest of its context; `AlreadyExists` when its id is taken."""
        values = {**asdict(record), "status": record.status.value, "labels": dict(record.labels)}
        newest = select(func.max(snapshots.c.created_at)).where(snapshots.c.context_id == record.context_id)

        def run(connection: Connection) -> None:
            values["created_at"] = moment_after(connection, record.created_at, newest)
            connection.execute(insert(snapshots).values(**values))

        try:
            await self._database.write(run)
        except IntegrityError:
            raise AlreadyExists(f"snapshot {record.id} already exists", field="id") from None

    async def ready(self, snapshot_id: str, *, size: int, new_bytes: int, files: int) -> None:
        """Record that the snapshot is complete; `Conflict` unless it was being created."""
        await self._end(snapshot_id, SnapshotStatus.READY, bytes=size, new_bytes=new_bytes, files=files)

    async def failed(self, snapshot_id: str, error: str) -> None:
        """Record that the snapshot failed; `Conflict` unless it was being created."""
        await self._end(snapshot_id, SnapshotStatus.FAILED, error=error)

    async def start_deletion(self, context_id: str, snapshot_id: str | None = None) -> None:
        """Record that one or all snapshots of a context are about to be deleted, so that none is restored any more."""
        statement = update(snapshots).where(snapshots.c.context_id == context_id)
        if snapshot_id is not None:
            statement = statement.where(snapshots.c.id == snapshot_id)
        await self._database.execute(statement.values(status=SnapshotStatus.FAILED.value, error=DELETING))

    async def unfinished_deletions(self) -> list[SnapshotRecord]:
        """Return the snapshots whose deletion was not finished."""
        return [each for each in await self.in_status(SnapshotStatus.FAILED) if each.error == DELETING]

    async def get(self, snapshot_id: str) -> SnapshotRecord | None:
        """Return the record with this id."""
        return await self._database.first(select(snapshots).where(snapshots.c.id == snapshot_id), _record)

    async def newest_ready(self, context_id: str) -> SnapshotRecord | None:
        """Return the newest ready snapshot of a context."""
        return await self._database.first(_ready(context_id), _record)

    async def mark_archived(self, snapshot_id: str) -> None:
        """Record that the archive has the snapshot."""
        await self._database.execute(update(snapshots).where(snapshots.c.id == snapshot_id).values(archived=True))

    async def unarchived(self, node: str) -> list[SnapshotRecord]:
        """Return the ready snapshots of a node that are not yet in the archive, oldest first."""
        query = select(snapshots).where(snapshots.c.status == SnapshotStatus.READY.value)
        query = query.where(snapshots.c.node == node, snapshots.c.archived.is_(False))
        return await self._database.all(query.order_by(snapshots.c.created_at, snapshots.c.id), _record)

    async def all_ready(self, context_id: str) -> list[SnapshotRecord]:
        """Return every ready snapshot of a context, newest first."""
        return await self._database.all(_ready(context_id), _record)

    async def in_status(self, status: SnapshotStatus) -> list[SnapshotRecord]:
        """Return every record with this status, oldest first."""
        query = select(snapshots).where(snapshots.c.status == status.value)
        return await self._database.all(query.order_by(snapshots.c.created_at, snapshots.c.id), _record)

    async def page(
        self, context_id: str, *, limit: int, cursor: str | None = None
    ) -> tuple[list[SnapshotRecord], str | None]:
        """Return at most `limit` records of a context after `cursor`, newest first, and the cursor of the next page."""
        query = select(snapshots).where(snapshots.c.context_id == context_id)
        return await read_page(self._database, snapshots, query, _record, limit, cursor)

    async def delete(self, snapshot_id: str) -> bool:
        """Delete the record of a snapshot; False when there was none."""

        def run(connection: Connection) -> bool:
            found = connection.execute(select(snapshots.c.id).where(snapshots.c.id == snapshot_id)).one_or_none()
            if found is None:
                return False
            stage(connection, [_event(connection, snapshot_id, EventKind.SNAPSHOT_DELETED)])
            return connection.execute(delete(snapshots).where(snapshots.c.id == snapshot_id)).rowcount == 1

        return await self._database.write(run)

    async def _end(self, snapshot_id: str, status: SnapshotStatus, **values: int | str) -> None:
        statement = (
            update(snapshots)
            .where(snapshots.c.id == snapshot_id, snapshots.c.status == SnapshotStatus.CREATING.value)
            .values(status=status.value, **values)
        )

        def run(connection: Connection) -> int:
            changed = connection.execute(statement).rowcount
            if changed and status is SnapshotStatus.READY:
                stage(connection, [_event(connection, snapshot_id, EventKind.SNAPSHOT_TAKEN)])
            return changed

        if await self._database.write(run) == 0:
            raise Conflict(f"snapshot {snapshot_id} is not being created", field="id", hint="it has ended or is gone")


def _event(connection: Connection, snapshot_id: str, kind: EventKind) -> EventDraft:
    record = _record(connection.execute(select(snapshots).where(snapshots.c.id == snapshot_id)).mappings().one())
    values = {"snapshot": record.id, "reason": record.reason, "bytes": record.bytes}
    node = record.node or ""
    return EventDraft(time.time(), kind.value, record.context_id, record.session_id, node, body_of(values))


def _ready(context_id: str) -> Select[tuple[object, ...]]:
    query = select(snapshots).where(snapshots.c.context_id == context_id)
    query = query.where(snapshots.c.status == SnapshotStatus.READY.value)
    return query.order_by(snapshots.c.created_at.desc(), snapshots.c.id.desc())
