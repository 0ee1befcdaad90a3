"""Where tasks are kept, on SQLite and on PostgreSQL."""

from __future__ import annotations

import asyncio
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from a2a.server.cluster import ConcurrentTaskModificationError, TaskVersion
from a2a.server.context import ServerCallContext
from a2a.server.models import TaskEventModel
from a2a.server.tasks import DatabasePushNotificationConfigStore
from a2a.types.a2a_pb2 import ListTasksRequest, Task, TaskPushNotificationConfig, TaskState, TaskStatus
from sqlalchemy import func, select

from carrel.errors import InvalidRequest, PlatformError
from carrel.integrations.a2a.callers import A2aCaller
from carrel.integrations.a2a.names import LONGEST
from carrel.integrations.a2a.tasks import FOLLOWED, PushUrls, TaskStore, open_tasks

ME, OTHER = (
    ServerCallContext(user=A2aCaller("carrel_me", "me")),
    ServerCallContext(user=A2aCaller("carrel_other", "other")),
)


def task(state: TaskState = TaskState.TASK_STATE_WORKING, age: timedelta = timedelta()) -> Task:
    made = Task(id=str(uuid.uuid4()), context_id="c" * LONGEST, status=TaskStatus(state=state))
    made.status.timestamp.FromDatetime(datetime.now(UTC) - age)
    return made


async def save(kept: TaskStore, made: Task, version: TaskVersion = TaskVersion.MISSING) -> TaskVersion:
    return await kept.tasks.save(made, event=made, prev=None, prev_version=version, context=ME)


async def test_a_task_is_found_by_its_owner_alone_and_by_any_process(database: str) -> None:
    made = task()
    async with open_tasks(database) as kept:
        first = await save(kept, made)
        await kept.save_initial_files(made.id, {"output/a": "1"})
    async with open_tasks(database) as kept:
        stored = await kept.tasks.get(made.id, ME)
        assert stored is not None
        assert stored.task.context_id == made.context_id
        assert await kept.tasks.get(made.id, OTHER) is None
        assert [each.id for each in (await kept.tasks.list(ListTasksRequest(), ME)).tasks] == [made.id]
        assert await kept.initial_files(made.id) == {"output/a": "1"}
        assert await kept.initial_files("another") is None
        await save(kept, made, first)
        with pytest.raises(ConcurrentTaskModificationError):
            await save(kept, made, first)


async def test_what_has_ended_for_long_is_cleared_up(database: str) -> None:
    old, young = task(TaskState.TASK_STATE_COMPLETED, FOLLOWED * 2), task(TaskState.TASK_STATE_COMPLETED)
    running = task(age=FOLLOWED * 2)
    async with open_tasks(database) as kept:
        for each in (old, young, running):
            await save(kept, each)
            await kept.save_initial_files(each.id, {})
        await kept.prune()
        found = [await kept.initial_files(each.id) for each in (old, young, running)]
        assert found == [None, {}, {}]
        async with kept.engine.connect() as connection:
            assert (await connection.execute(select(func.count()).select_from(TaskEventModel))).scalar_one() == 2
        assert await kept.tasks.get(old.id, ME) is not None


async def test_urls_are_looked_up_now_and_then(tmp_path: Path) -> None:
    where, made = str(tmp_path / "agent.db"), task()
    async with open_tasks(where) as kept, open_tasks(where) as another:
        assert await kept.push.get_info_for_dispatch(made.id) == []
        await another.push.set_info(made.id, TaskPushNotificationConfig(id="1", url="http://a.example/"), ME)
        assert await kept.push.get_info_for_dispatch(made.id) == []  # a little later
        await kept.push.set_info(made.id, TaskPushNotificationConfig(id="2", url="http://b.example/"), ME)
        assert {each.id for each in await kept.push.get_info_for_dispatch(made.id)} == {"1", "2"}
        await kept.push.delete_info(made.id, ME, "1")
        assert [each.id for each in await kept.push.get_info_for_dispatch(made.id)] == ["2"]


async def test_a_url_that_is_kept_while_they_are_looked_up_is_told_at_once(database: str) -> None:
    made, found, go = task(), asyncio.Event(), asyncio.Event()

    class Slow(DatabasePushNotificationConfigStore):
        async def get_info_for_dispatch(self, task_id: str) -> list[TaskPushNotificationConfig]:
            before: list[TaskPushNotificationConfig] = await super().get_info_for_dispatch(task_id)
            found.set()
            await go.wait()
            return before

    class Urls(PushUrls, Slow):
        """Those of a database that is long in answering."""

    async with open_tasks(database) as kept:
        urls = Urls(kept.engine)
        looking = asyncio.ensure_future(urls.get_info_for_dispatch(made.id))
        await found.wait()
        await urls.set_info(made.id, TaskPushNotificationConfig(id="1", url="http://a.example/"), ME)
        go.set()
        assert await looking == []
        assert [each.id for each in await urls.get_info_for_dispatch(made.id)] == ["1"]


@pytest.mark.parametrize("where", ["mysql://root:hush@localhost/x", "nonsense://"])
async def test_other_databases_are_refused(where: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        async with open_tasks(where):
            pass
    assert "hush" not in str(caught.value)


async def test_a_database_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("this is no database, and long enough to be sure of that" * 20)
    with pytest.raises(PlatformError):
        async with open_tasks(str(tmp_path / "file")):
            pass
    with pytest.raises(InvalidRequest):
        async with open_tasks(str(tmp_path / "file" / "agent.db")):
            pass
    with pytest.raises(PlatformError) as caught:
        async with open_tasks("postgresql://me:hush-hush@127.0.0.1:9/x"):
            pass
    assert "hush-hush" not in str(caught.value)


async def test_the_file_is_the_owners_alone(tmp_path: Path) -> None:
    async with open_tasks(f"sqlite:///{tmp_path}/deep/agent.db"):
        assert (tmp_path / "deep" / "agent.db").stat().st_mode & 0o777 == 0o600
