"""What ended long ago is forgotten with all that is kept of it; what runs or waits never is. On both databases."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest
from a2a.server.models import PushNotificationConfigModel, TaskEventModel, TaskVersionModel
from a2a.types.a2a_pb2 import ListTasksRequest, Task, TaskPushNotificationConfig, TaskState
from a2a.utils.errors import TaskNotFoundError
from langchain_core.messages import AIMessage, HumanMessage
from sqlalchemy import func, select
from tests.integrations.a2a.test_tasks import ME, save, task
from tests.support.a2a_ground import Ground, answer, state, until

from carrel.errors import InvalidRequest
from carrel.integrations.a2a.conversations import Conversations
from carrel.integrations.a2a.names import carrel_context, task_thread
from carrel.integrations.a2a.retention import AT_ONCE, TaskRetention
from carrel.integrations.a2a.tasks import TERMINAL, InitialFilesRow, TaskRow, TaskStore, open_tasks
from carrel.integrations.langgraph import Checkpoints, build_graph, open_checkpointer

DAYS = 30.0
TABLES = (TaskRow, InitialFilesRow, TaskEventModel, TaskVersionModel, PushNotificationConfigModel)
SAID = [HumanMessage("hello", id="task-1"), AIMessage("hello yourself")]


@asynccontextmanager
async def keeping(database: str) -> AsyncIterator[tuple[TaskStore, Conversations, Checkpoints, TaskRetention]]:
    async with open_checkpointer(database) as checkpoints, open_tasks(database) as kept:
        conversations = Conversations(build_graph("shell", checkpointer=checkpoints.saver), checkpoints)
        yield kept, conversations, checkpoints, TaskRetention(kept, conversations, checkpoints, keep_days=DAYS)


async def put(kept: TaskStore, made: Task) -> None:
    """Keep a task that has come to its state from another."""
    before = task()
    before.id, before.context_id = made.id, made.context_id
    await save(kept, made, await save(kept, before))


async def counts(kept: TaskStore) -> list[int]:
    async with kept.engine.connect() as connection:
        return [(await connection.execute(select(func.count()).select_from(each))).scalar_one() for each in TABLES]


async def test_what_ended_long_ago_is_forgotten_and_nothing_else(database: str) -> None:
    old, young = timedelta(days=DAYS, minutes=1), timedelta(days=DAYS, minutes=-1)
    others = [each for each in TaskState.values() if each not in TERMINAL]
    gone = [task(each, old) for each in sorted(TERMINAL)]
    left = [*(task(each, young) for each in sorted(TERMINAL)), *(task(each, old * 10) for each in others)]
    async with keeping(database) as (kept, conversations, checkpoints, tidy):
        for each in gone + left:
            await put(kept, each)
            await kept.save_initial_files(each.id, {})
            await kept.push.set_info(each.id, TaskPushNotificationConfig(id="1", url="http://a.example/"), ME)
            thread = task_thread(carrel_context(each.context_id), each.id)
            config = {"configurable": {"thread_id": thread}}
            await conversations._graph.aupdate_state(config, {"messages": SAID}, as_node="model")
        assert await tidy.sweep() == len(gone)
        assert [each.id for each in gone if await kept.tasks.get(each.id, ME) is not None] == []
        assert [each.id for each in left if await kept.tasks.get(each.id, ME) is None] == []
        assert await counts(kept) == [len(left), len(left), 2 * len(left), len(left), len(left)]
        for each in gone + left:
            thread = task_thread(carrel_context(each.context_id), each.id)
            found = await checkpoints.saver.aget_tuple({"configurable": {"thread_id": thread}})
            assert (found is None) == (each in gone)
        assert await tidy.sweep() == 0


async def test_a_conversation_goes_with_its_last_task(database: str) -> None:
    old = timedelta(days=DAYS * 2)
    async with keeping(database) as (kept, conversations, _, tidy):
        for name, ages in {"all-old": [old, old], "one-young": [old, timedelta()], "none": []}.items():
            await conversations.add(name, SAID)
            for age in ages:
                made = task(TaskState.TASK_STATE_COMPLETED, age)
                made.context_id = name
                await put(kept, made)
        assert await tidy.sweep() == 3
        assert await conversations.read("all-old") == []
        assert len(await conversations.read("one-young")) == len(SAID)
        assert len(await conversations.read("none")) == len(SAID)


async def test_many_are_forgotten_and_a_conversation_in_use_is_not(database: str) -> None:
    async with keeping(database) as (kept, conversations, checkpoints, tidy):
        for number in range(AT_ONCE + 5):
            made = task(TaskState.TASK_STATE_FAILED, timedelta(days=DAYS + 1 + number))
            made.context_id = f"context-{number % 3}"
            await put(kept, made)
        await conversations.add("context-1", SAID)
        async with checkpoints.running("context-1"):
            assert await tidy.sweep() == AT_ONCE + 5
        assert await conversations.read("context-1")
        assert (await counts(kept))[0] == 0


async def test_a_task_that_ended_without_a_time_is_not_kept_for_ever(database: str) -> None:
    made = task(TaskState.TASK_STATE_FAILED)
    made.status.ClearField("timestamp")
    async with keeping(database) as (kept, _, _, tidy):
        await save(kept, made)
        await kept.prune()
        assert await tidy.sweep() == 0
        async with kept.engine.connect() as connection:
            assert (await connection.execute(select(TaskRow.last_updated))).scalar_one() is not None


async def test_an_agent_forgets_by_itself(ground: Ground, database: str) -> None:
    async with ground.talk(database=database) as one:
        ended = await one.send("echo hello", context=ground.context)
        waits = await one.send("uname -s", context=ground.context)
        assert (answer(ended), state(waits)) == ("hello", "input_required")
    async with ground.talk(database=database, keep_days=1e-9) as one:

        async def forgotten() -> bool:
            return [each.id for each in (await one.client.list_tasks(ListTasksRequest())).tasks] == [waits.id]

        await until(forgotten)
        with pytest.raises(TaskNotFoundError):
            await one.get(ended.id)
        assert state(await one.get(waits.id)) == "input_required"


@pytest.mark.parametrize("days", [0.0, -1.0, float("nan"), float("inf")])
async def test_days_that_are_none(ground: Ground, days: float) -> None:
    with pytest.raises(InvalidRequest) as caught:
        async with ground.agent(keep_days=days):
            pass
    assert caught.value.field == "keep_days"
