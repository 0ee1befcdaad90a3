"""Where tasks are kept: the SDK's own stores on one SQLite file or PostgreSQL, and what each task began with.

Any process on the same database answers for any task. Knows tables, and nothing of graphs.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
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
from carrel.integrations.langgraph.sqlite import NearConnection

TERMINAL = frozenset(
    {
        TaskState.TASK_STATE_COMPLETED,
        TaskState.TASK_STATE_FAILED,
        TaskState.TASK_STATE_CANCELED,
        TaskState.TASK_STATE_REJECTED,
    }
)
FOLLOWED = timedelta(hours=1)
"""How long the events of a task that has ended stay for who follows it from another process."""
URLS_S = 2.0
MOST_URLS_KNOWN = 1000
BUSY_S = 10.0
_PRAGMAS = ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=NORMAL")


class KeptTask(TaskMixin, Base):
    """A task. As the SDK keeps it, but for contexts of longer names."""

    __tablename__ = "a2a_tasks"

    context_id: Mapped[str] = mapped_column(String(LONGEST), nullable=False)


_HAS_ENDED: ColumnElement[bool] = (
    KeptTask.status["state"].as_string().in_([TaskState.Name(state) for state in sorted(TERMINAL)])
)


class KeptBeginning(Base):
    """The files there were when a task began, so that those it made are known whoever ends it."""

    __tablename__ = "a2a_beginnings"

    task_id: Mapped[str] = mapped_column(String(36), primary_key=True)
    files: Mapped[dict[str, str]] = mapped_column(JSON, nullable=False)


class KeptUrls(DatabasePushNotificationConfigStore):
    """The URLs that are told of tasks. Every event asks for them, so they are looked up only now and then."""

    def __init__(self, engine: AsyncEngine):
        super().__init__(engine)
        self._known: OrderedDict[str, tuple[float, list[TaskPushNotificationConfig]]] = OrderedDict()
        self._changes = 0

    async def get_info_for_dispatch(self, task_id: str) -> list[TaskPushNotificationConfig]:
        """The URLs of a task; another process's change of them is seen a little later."""
        until, found = self._known.get(task_id, (0.0, []))
        if time.monotonic() < until:
            return found
        before = self._changes
        found = await super().get_info_for_dispatch(task_id)
        if self._changes != before:  # what was found may be from before that
            return found
        self._known[task_id] = (time.monotonic() + URLS_S, found)
        while len(self._known) > MOST_URLS_KNOWN:
            self._known.popitem(last=False)
        return found

    async def set_info(
        self, task_id: str, notification_config: TaskPushNotificationConfig, context: ServerCallContext
    ) -> TaskPushNotificationConfig:
        """Keep a URL."""
        kept = await super().set_info(task_id, notification_config, context)
        self._changed(task_id)
        return kept

    async def delete_info(self, task_id: str, context: ServerCallContext, config_id: str | None = None) -> None:
        """Forget a URL, or all of a task."""
        await super().delete_info(task_id, context, config_id)
        self._changed(task_id)

    def _changed(self, task_id: str) -> None:
        self._changes += 1
        self._known.pop(task_id, None)


@dataclass(frozen=True)
class TaskStore:
    """The stores of one database."""

    engine: AsyncEngine
    tasks: VersionedDatabaseTaskStore
    events: DatabaseTaskEventStream
    push: KeptUrls

    async def beginning(self, task_id: str) -> dict[str, str] | None:
        """The files a task began with; None when it has not begun."""
        query = select(KeptBeginning.files).where(KeptBeginning.task_id == task_id)
        async with self.engine.connect() as connection:
            return (await connection.execute(query)).scalar_one_or_none()

    async def begin(self, task_id: str, files: dict[str, str]) -> None:
        """Keep the files a task begins with."""
        async with self.engine.begin() as connection:
            await connection.execute(insert(KeptBeginning).values(task_id=task_id, files=files))

    async def prune(self) -> None:
        """Drop what nobody needs any more of tasks that have ended."""
        now = _now()
        ended = select(KeptTask.id).where(_HAS_ENDED, KeptTask.last_updated < now - FOLLOWED)
        async with self.engine.begin() as connection:
            # The SDK ends some tasks without a time; they are as old as they were found.
            untimed = update(KeptTask).where(_HAS_ENDED, KeptTask.last_updated.is_(None))
            await connection.execute(untimed.values(last_updated=now))
            await connection.execute(delete(TaskEventModel).where(TaskEventModel.task_id.in_(ended)))
            await connection.execute(delete(KeptBeginning).where(KeptBeginning.task_id.in_(ended)))

    async def ended(self, keep: timedelta, most: int) -> list[tuple[str, str]]:
        """Some tasks that ended longer ago than `keep`, the oldest first: their ids and contexts."""
        query = select(KeptTask.id, KeptTask.context_id).where(_HAS_ENDED, KeptTask.last_updated < _now() - keep)
        async with self.engine.connect() as connection:
            found = await connection.execute(query.order_by(KeptTask.last_updated).limit(most))
            return [(row.id, row.context_id) for row in found]

    async def delete(self, task_ids: Sequence[str]) -> None:
        """Drop tasks and all that is kept beside them. For those that have ended."""
        async with self.engine.begin() as connection:
            for model in (KeptBeginning, TaskEventModel, TaskVersionModel, PushNotificationConfigModel):
                await connection.execute(delete(model).where(model.task_id.in_(task_ids)))
            await connection.execute(delete(KeptTask).where(KeptTask.id.in_(task_ids)))

    async def any_of(self, context_id: str, *, besides: Sequence[str]) -> bool:
        """Whether a context has a task besides some, whoever it belongs to."""
        query = select(KeptTask.id).where(KeptTask.context_id == context_id, KeptTask.id.not_in(besides)).limit(1)
        async with self.engine.connect() as connection:
            return (await connection.execute(query)).first() is not None


def _now() -> datetime:
    """Now, as the SDK keeps times."""
    return datetime.now(UTC).replace(tzinfo=None)


@asynccontextmanager
async def open_tasks(database: str) -> AsyncIterator[TaskStore]:
    """The stores of a SQLite file or a `postgresql://` URL; tables are made. No error shows a password."""
    engine = _engine(database)
    try:
        kept = TaskStore(
            engine,
            VersionedDatabaseTaskStore(engine),
            DatabaseTaskEventStream(engine),
            KeptUrls(engine),
        )
        cast(DatabaseTaskStore, kept.tasks.as_task_store).task_model = cast(type[TaskModel], KeptTask)
        try:
            await kept.tasks.initialize()
            await kept.push.initialize()
            async with engine.begin() as connection:
                await connection.run_sync(Base.metadata.create_all, tables=[cast(Table, KeptBeginning.__table__)])
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
        # One connection: those who write wait for each other here, not in the database.
        engine = create_async_engine(
            URL.create("sqlite+aiosqlite", database=str(path)),
            pool_size=1,
            max_overflow=0,
            hide_parameters=True,
            connect_args={"async_creator_fn": lambda *_args, **_settings: NearConnection(str(path), BUSY_S)},
        )
        event.listen(engine.sync_engine, "connect", _prepare)
        return engine
    try:
        url = make_url(database)
    except (ArgumentError, ValueError):
        raise InvalidRequest("the database is no URL", field="database") from None
    if url.get_backend_name() not in {"postgresql", "postgres"}:
        raise InvalidRequest(
            "tasks are kept in SQLite or PostgreSQL",
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
