"""Tasks that outlive their process: another one on the same database answers for them and goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from a2a.client.errors import A2AClientError
from a2a.types.a2a_pb2 import ListTasksRequest, Role, SubscribeToTaskRequest, TaskPushNotificationConfig, TaskState
from a2a.utils.errors import A2AError
from tests.support.a2a_ground import A2aCaller, Ground, Process, answer, caller, said, state, until, words

from carrel.integrations.a2a.push import MOST_CONFIGS

pytestmark = pytest.mark.usefixtures("agents_fork")


@asynccontextmanager
async def another(ground: Ground, *arguments: str) -> AsyncIterator[tuple[Process, A2aCaller]]:
    process = await asyncio.to_thread(Process, ground, *arguments)
    try:
        async with caller(process.url, ground.token) as found:
            yield process, found
    finally:
        await asyncio.to_thread(process.kill)


async def test_a_killed_process_is_taken_over(ground: Ground) -> None:
    """One task runs, one waits: the next process ends the first without running its command twice, and resumes the
    other when the inbox has decided.
    """
    await ground.owner.policy(ground.context).put(
        settings={"permissions": {"allow": ["shell(echo:*)", "shell(sleep:*)", "shell([:*)", "file(read:${WORKSPACE}/**)",
                                            "file(write:${WORKSPACE}/**)"]}}
    )  # fmt: skip
    async with another(ground) as (first, one):
        long = "echo x >> began; while [ ! -e go ]; do sleep 0.05; done; echo ended"
        runs = await one.start(long, context=ground.context)
        waits = await one.send("uname -s", context=ground.context)
        assert state(waits) == "input_required"
        box = await ground.owner.sandbox(ground.context)

        async def begun() -> bool:
            return await box.files.exists("began")

        await until(begun)
        await asyncio.to_thread(first.kill)
    async with another(ground) as (_, other):
        assert state(await other.get(runs.id)) == "working"
        assert state(await other.get(waits.id)) == "input_required"
        await ground.person.approvals.approve(await ground.pending())
        ended = await other.pause(waits.id, states={TaskState.TASK_STATE_COMPLETED})
        assert answer(ended) == "Linux"
        await box.files.write("go", b"")
        assert answer(await other.pause(runs.id)) == "ended"
        assert await box.files.read("began") == b"x\n"


async def test_an_ending_process_leaves_its_tasks(ground: Ground) -> None:
    async with ground.talk() as one:
        task = await one.start("sleep 1; echo late", context=ground.context)
    async with ground.talk(streaming=True) as other:
        states = [
            event.status_update.status.state
            async for event in other.client.subscribe(SubscribeToTaskRequest(id=task.id))
            if event.HasField("status_update")
        ]
        assert states[-1] == TaskState.TASK_STATE_COMPLETED
        assert answer(await other.get(task.id)) == "late"


async def test_a_task_of_another_process_is_followed_and_cancelled(ground: Ground) -> None:
    await ground.owner.policy(ground.context).delete()
    async with another(ground) as (_, one), ground.talk(streaming=True) as other:
        task = await one.start("sleep 300", context=ground.context)

        async def runs() -> bool:
            return await ground.programs("sleep") == 1

        await until(runs)
        assert {each.id for each in (await other.client.list_tasks(ListTasksRequest())).tasks} == {task.id}
        assert state(await other.cancel(task.id)) == "canceled"

        async def over() -> bool:
            return await ground.programs("sleep") == 0

        await until(over)
        assert state(await one.get(task.id)) == "canceled"


async def test_cancel_ends_what_a_killed_process_left(ground: Ground) -> None:
    await ground.owner.policy(ground.context).delete()
    async with another(ground) as (first, one):
        task = await one.start("sleep 300", context=ground.context)

        async def runs() -> bool:
            return await ground.programs("sleep") == 1

        await until(runs)
        await asyncio.to_thread(first.kill)
    async with ground.talk() as other:
        assert state(await other.cancel(task.id)) == "canceled"
        assert await ground.programs("sleep") == 0


async def test_tasks_in_postgresql_outlive_their_process(ground: Ground, database: str) -> None:
    long = "team:" + "c" * 100
    async with ground.talk(database=database) as one:
        done = await one.send("echo hello", context=long)
        waits = await one.send("uname -s", context=ground.context)
        assert (state(done), state(waits)) == ("completed", "input_required")
    await ground.person.approvals.approve(await ground.pending())
    async with ground.talk(database=database) as other:
        assert answer(await other.get(done.id)) == "hello"
        assert (await other.get(done.id)).context_id == long
        assert answer(await other.pause(waits.id, states={TaskState.TASK_STATE_COMPLETED})) == "Linux"
    await ground.owner.attach(await ground.owner.find(long)).terminate(delete_files=True)


async def test_of_two_processes_that_wait_for_a_decision_one_goes_on(ground: Ground, database: str) -> None:
    async with ground.talk(database=database) as one, ground.talk(database=database) as other:
        task = await one.send("uname -s", context=ground.context)
        assert state(await other.get(task.id)) == "input_required"
        await ground.person.approvals.approve(await ground.pending())
        completed = {TaskState.TASK_STATE_COMPLETED}
        ended = await asyncio.gather(*(each.pause(task.id, states=completed) for each in (one, other)))
        assert [answer(each) for each in ended] == ["Linux", "Linux"]
        box = await ground.owner.sandbox(ground.context)
        assert len([each for each in await box.commands.list() if each.command == "uname -s"]) == 1


async def test_a_message_to_a_running_task_changes_nothing(ground: Ground) -> None:
    async with ground.talk() as one:
        task = await one.start("sleep 0.5; echo first", context=ground.context)
        after = await one.send("echo second", task=task.id)
        assert (state(after), answer(after)) == ("completed", "first")
        with pytest.raises((A2AError, A2AClientError)):
            await one.send("echo third", task=task.id)


async def test_a_message_with_another_context_than_its_tasks_is_refused(ground: Ground) -> None:
    async with ground.talk() as one:
        task = await one.send("uname -s", context=ground.context)
        with pytest.raises(A2AError, match="does not match"):
            await one.send("approve", task=task.id, context="another")
        assert "does not wait for apr-1" in words(await one.send("deny apr-1", task=task.id))


async def test_a_message_is_its_callers_whatever_role_it_says(ground: Ground) -> None:
    message = said("echo hello", context=ground.context)
    message.role = Role.ROLE_AGENT
    async with ground.talk() as one:
        [event] = await one.events(message)
        assert (state(event.task), answer(event.task)) == ("completed", "hello")


async def test_a_context_with_a_long_name_is_refused(ground: Ground) -> None:
    async with ground.talk() as one:
        with pytest.raises(A2AError, match="at most 255"):
            await one.send("true", context="c" * 256)


async def test_a_task_tells_only_so_many_urls(ground: Ground) -> None:
    async with ground.talk(push_hosts=("127.0.0.1",)) as one:
        task = await one.send("uname -s", context=ground.context)
        for number in range(MOST_CONFIGS + 1):
            config = TaskPushNotificationConfig(task_id=task.id, id=f"c{number}", url="http://127.0.0.1:9/")
            if number < MOST_CONFIGS:
                await one.client.create_task_push_notification_config(config)
                continue
            with pytest.raises(A2AError, match="at most"):
                await one.client.create_task_push_notification_config(config)
