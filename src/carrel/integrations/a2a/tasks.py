"""The stores of tasks in a SQLite file or PostgreSQL: the SDK's own, and the files that existed when a task began.

Any process on the same database can handle any task.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

from a2a.server.cluster import DatabaseTaskEventStream, VersionedDatabaseTaskStore
from a2a.server.context import ServerCallContext
from a2a.server.models import (
    Base,
    PushNotificationConfigModel,
    TaskEventModel,
    TaskMixin,
    TaskModel,
    TaskVersionModel,
)
from a2a.server.tasks import DatabasePushNotificationConfigStore, DatabaseTaskStore
from a2a.types.a2a_pb2 import TaskPushNotificationConfig, TaskState
from sqlalchemy import JSON, ColumnElement, String, Table, delete, event, insert, select, update
from sqlalchemy.engine import URL, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import Mapped, mapped_column
from sqlalchemy.pool import ConnectionPoolEntry

from carrel.errors import InvalidRequest, PlatformError
from carrel.integrations.a2a.names import LONGEST
from carrel.integrations.langgraph.sqlite import InlineConnection
from carrel.primitives.cache import Cache

TERMINAL = frozenset(
    {
        TaskState.TASK_STATE_COMPLETED,
        TaskState.TASK_STATE_FAILED,
        TaskState.TASK_STATE_CANCELED,
        TaskState.TASK_STATE_REJECTED,
    }
)
FOLLOWED = timedelta(hours=1)
"""The events of an ended task are kept this long for callers who follow it from another process."""
URLS_S = 2.0
MOST_URLS_KNOWN = 1000
BUSY_S = 10.0
_PRAGMAS = ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=NORMAL")


class TaskRow(TaskMixin, Base):
    """A row of the SDK's table of tasks, with room for longer context ids."""

    __tablename__ = "a2a_tasks"

    context_id: Mapped[str] = mapped_column(String(LONGEST), nullable=False)


_HAS_ENDED: ColumnElement[bool] = (
    TaskRow.status["state"].as_string().in_([TaskState.Name(state) for state in sorted(TERMINAL)])
)


class InitialFilesRow(Base):
    """The files in `output/` when a task began, so that any process can tell which files the task made."""

    __tablename__ = "a2a_beginnings"

    task_id: Mapped[str] = mapped_column(String(36), primary_key=True)
    files: Mapped[dict[str, str]] = mapped_column(JSON, nullable=False)


class PushUrls(DatabasePushNotificationConfigStore):
    """The URLs for push notifications. Every event needs them, so they are cached for a moment."""

    def __init__(self, engine: AsyncEngine):
        super().__init__(engine)
        self._known: Cache[str, list[TaskPushNotificationConfig]] = Cache(MOST_URLS_KNOWN, URLS_S)
        self._changes = 0

    async def get_info_for_dispatch(self, task_id: str) -> list[TaskPushNotificationConfig]:
        """Return the URLs of a task. A change by another process is seen a little later."""
        known = self._known.get(task_id)
        if known is not None:
            return known
        before = self._changes
        found: list[TaskPushNotificationConfig] = await super().get_info_for_dispatch(task_id)
        if self._changes == before:  # else the result may be older than the change
            self._known.put(task_id, found)
        return found

    async def set_info(
        self, task_id: str, notification_config: TaskPushNotificationConfig, context: ServerCallContext
    ) -> TaskPushNotificationConfig:
        """Store a URL."""
        kept = await super().set_info(task_id, notification_config, context)
        self._changed(task_id)
        return kept

    async def delete_info(self, task_id: str, context: ServerCallContext, config_id: str | None = None) -> None:
        """Delete a URL, or all of a task."""
        await super().delete_info(task_id, context, config_id)
        self._changed(task_id)

    def _changed(self, task_id: str) -> None:
        self._changes += 1
        self._known.pop(task_id)


@dataclass(frozen=True)
class TaskStore:
    """The stores of one database."""

    engine: AsyncEngine
    tasks: VersionedDatabaseTaskStore
    events: DatabaseTaskEventStream
    push: PushUrls

    async def initial_files(self, task_id: str) -> dict[str, str] | None:
        """Return the files that existed when a task began; None when it has not begun."""
        query = select(InitialFilesRow.files).where(InitialFilesRow.task_id == task_id)
        async with self.engine.connect() as connection:
            return (await connection.execute(query)).scalar_one_or_none()

    async def save_initial_files(self, task_id: str, files: dict[str, str]) -> None:
        """Store the files that exist when a task begins."""
        async with self.engine.begin() as connection:
            await connection.execute(insert(InitialFilesRow).values(task_id=task_id, files=files))

    async def prune(self) -> None:
        """Delete events and initial files of tasks that ended a while ago."""
        now = _now()
        ended = select(TaskRow.id).where(_HAS_ENDED, TaskRow.last_updated < now - FOLLOWED)
        async with self.engine.begin() as connection:
            # The SDK ends some tasks without a time; their age counts from when they are found here.
            untimed = update(TaskRow).where(_HAS_ENDED, TaskRow.last_updated.is_(None))
            await connection.execute(untimed.values(last_updated=now))
            await connection.execute(delete(TaskEventModel).where(TaskEventModel.task_id.in_(ended)))
            await connection.execute(delete(InitialFilesRow).where(InitialFilesRow.task_id.in_(ended)))

    async def ended(self, keep: timedelta, most: int) -> list[tuple[str, str]]:
        """Return the ids and contexts of tasks that ended longer ago than `keep`, the oldest first."""
        query = select(TaskRow.id, TaskRow.context_id).where(_HAS_ENDED, TaskRow.last_updated < _now() - keep)
        async with self.engine.connect() as connection:
            found = await connection.execute(query.order_by(TaskRow.last_updated).limit(most))
            return [(row.id, row.context_id) for row in found]

    async def delete(self, task_ids: Sequence[str]) -> None:
        """Delete ended tasks with all their data."""
        async with self.engine.begin() as connection:
            for model in (InitialFilesRow, TaskEventModel, TaskVersionModel, PushNotificationConfigModel):
                await connection.execute(delete(model).where(model.task_id.in_(task_ids)))
            await connection.execute(delete(TaskRow).where(TaskRow.id.in_(task_ids)))

    async def any_of(self, context_id: str, *, besides: Sequence[str]) -> bool:
        """Return whether a context has another task than these, of any caller."""
        query = select(TaskRow.id).where(TaskRow.context_id == context_id, TaskRow.id.not_in(besides)).limit(1)
        async with self.engine.connect() as connection:
            return (await connection.execute(query)).first() is not None


def _now() -> datetime:
    """Return the time as the SDK stores it: UTC without a time zone."""
    return datetime.now(UTC).replace(tzinfo=None)


@asynccontextmanager
async def open_tasks(database: str) -> AsyncIterator[TaskStore]:
    """Open the stores of a SQLite file or a `postgresql://` URL and create tables. No error shows a password."""
    engine = _engine(database)
    try:
        kept = TaskStore(
            engine,
            VersionedDatabaseTaskStore(engine),
            DatabaseTaskEventStream(engine),
            PushUrls(engine),
        )
        cast(DatabaseTaskStore, kept.tasks.as_task_store).task_model = cast(type[TaskModel], TaskRow)
        try:
            await kept.tasks.initialize()
            await kept.push.initialize()
            async with engine.begin() as connection:
                await connection.run_sync(Base.metadata.create_all, tables=[cast(Table, InitialFilesRow.__table__)])
            await kept.prune()
        except (SQLAlchemyError, OSError) as error:
            said = getattr(error, "orig", None) or type(error).__name__
            raise PlatformError(f"the database of tasks cannot be used: {said}", field="database") from None
        yield kept
    finally:
        await engine.dispose()


def _engine(database: str) -> AsyncEngine:
    scheme, separator, rest = database.partition("://")
    if not separator or scheme == "sqlite":
        path = Path(rest.removeprefix("/") if separator else database)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise InvalidRequest(f"cannot use {path}: {error.strerror}", field="database") from None
        # One connection, so that writers wait for each other here and not in the database.
        engine = create_async_engine(
            URL.create("sqlite+aiosqlite", database=str(path)),
            pool_size=1,
            max_overflow=0,
            hide_parameters=True,
            connect_args={"async_creator_fn": lambda *_args, **_settings: InlineConnection(str(path), BUSY_S)},
        )
        event.listen(engine.sync_engine, "connect", _prepare)
        return engine
    try:
        url = make_url(database)
    except (ArgumentError, ValueError):
        raise InvalidRequest("the database is not a valid URL", field="database") from None
    if url.get_backend_name() not in {"postgresql", "postgres"}:
        raise InvalidRequest(
            "the database of tasks must be SQLite or PostgreSQL",
            field="database",
            hint="name a file, or postgresql://user:password@host:port/name",
        )
    return create_async_engine(
        url.set(drivername="postgresql+psycopg"), pool_size=8, pool_pre_ping=True, hide_parameters=True
    )


def _prepare(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    cursor = connection.cursor()
    for pragma in _PRAGMAS:
        cursor.execute(pragma)
    cursor.close()
