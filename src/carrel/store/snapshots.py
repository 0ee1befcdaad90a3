"""The queries on snapshots. Knows no volume driver and no archive: it stores what it is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from sqlalchemy import Select, delete, insert, select, update
from sqlalchemy.engine import RowMapping
from sqlalchemy.exc import IntegrityError

from carrel.errors import AlreadyExists, Conflict
from carrel.store.cursors import read_page
from carrel.store.database import Database
from carrel.store.tables import snapshots

DOOMED = "it is being deleted"
"""The error of a snapshot that was about to be deleted."""


class SnapshotStatus(StrEnum):
    """How far a snapshot is: only a ready one may be restored."""

    CREATING = "creating"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """One row: what is known of a snapshot. The sizes are known once it is ready."""

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
        """Add a record; `AlreadyExists` when its id is taken."""
        values = {**asdict(record), "status": record.status.value, "labels": dict(record.labels)}
        statement = insert(snapshots).values(**values)
        try:
            await self._database.execute(statement)
        except IntegrityError:
            raise AlreadyExists(f"there is a snapshot {record.id} already", field="id") from None

    async def ready(self, snapshot_id: str, *, size: int, new_bytes: int, files: int) -> None:
        """The snapshot is complete; `Conflict` unless it was being created."""
        await self._end(snapshot_id, SnapshotStatus.READY, bytes=size, new_bytes=new_bytes, files=files)

    async def failed(self, snapshot_id: str, error: str) -> None:
        """The snapshot could not be made; `Conflict` unless it was being created."""
        await self._end(snapshot_id, SnapshotStatus.FAILED, error=error)

    async def doom(self, context_id: str, snapshot_id: str | None = None) -> None:
        """One snapshot of a context, or all of them, are about to be deleted: none can be restored from now on."""
        statement = update(snapshots).where(snapshots.c.context_id == context_id)
        if snapshot_id is not None:
            statement = statement.where(snapshots.c.id == snapshot_id)
        statement = statement.values(status=SnapshotStatus.FAILED.value, error=DOOMED)
        await self._database.execute(statement)

    async def doomed(self) -> list[SnapshotRecord]:
        """The snapshots whose deletion was not finished."""
        return [each for each in await self.in_status(SnapshotStatus.FAILED) if each.error == DOOMED]

    async def get(self, snapshot_id: str) -> SnapshotRecord | None:
        """The record with that id."""
        found = await self._all(select(snapshots).where(snapshots.c.id == snapshot_id))
        return found[0] if found else None

    async def newest_ready(self, context_id: str) -> SnapshotRecord | None:
        """The last good snapshot of a context."""
        query = select(snapshots).where(snapshots.c.context_id == context_id)
        query = query.where(snapshots.c.status == SnapshotStatus.READY.value)
        found = await self._all(query.order_by(snapshots.c.created_at.desc(), snapshots.c.id.desc()).limit(1))
        return found[0] if found else None

    async def mark_archived(self, snapshot_id: str) -> None:
        """The archive has it."""
        statement = update(snapshots).where(snapshots.c.id == snapshot_id).values(archived=True)
        await self._database.execute(statement)

    async def unarchived(self, node: str) -> list[SnapshotRecord]:
        """The ready snapshots of a node that are not in the archive yet, oldest first."""
        query = select(snapshots).where(snapshots.c.status == SnapshotStatus.READY.value)
        query = query.where(snapshots.c.node == node, snapshots.c.archived.is_(False))
        return await self._all(query.order_by(snapshots.c.created_at, snapshots.c.id))

    async def all_ready(self, context_id: str) -> list[SnapshotRecord]:
        """Every good snapshot of a context, newest first."""
        query = select(snapshots).where(snapshots.c.context_id == context_id)
        query = query.where(snapshots.c.status == SnapshotStatus.READY.value)
        return await self._all(query.order_by(snapshots.c.created_at.desc(), snapshots.c.id.desc()))

    async def in_status(self, status: SnapshotStatus) -> list[SnapshotRecord]:
        """Every record with that status, oldest first."""
        query = select(snapshots).where(snapshots.c.status == status.value)
        return await self._all(query.order_by(snapshots.c.created_at, snapshots.c.id))

    async def page(
        self, context_id: str, *, limit: int, cursor: str | None = None
    ) -> tuple[list[SnapshotRecord], str | None]:
        """Newest first: at most `limit` records of a context after `cursor`, and the cursor of the next page."""
        query = select(snapshots).where(snapshots.c.context_id == context_id)
        return await read_page(self._database, snapshots, query, _record, limit, cursor)

    async def delete(self, snapshot_id: str) -> bool:
        """Forget a snapshot; False when there was none."""
        statement = delete(snapshots).where(snapshots.c.id == snapshot_id)
        return await self._database.execute(statement) == 1

    async def _end(self, snapshot_id: str, status: SnapshotStatus, **values: int | str) -> None:
        statement = (
            update(snapshots)
            .where(snapshots.c.id == snapshot_id, snapshots.c.status == SnapshotStatus.CREATING.value)
            .values(status=status.value, **values)
        )
        if await self._database.execute(statement) == 0:
            raise Conflict(f"snapshot {snapshot_id} is not being created", field="id", hint="it has ended or is gone")

    async def _all(self, query: Select[tuple[object, ...]]) -> list[SnapshotRecord]:
        return await self._database.all(query, _record)
