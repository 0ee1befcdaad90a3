"""Answers, cancels and tokens that come at the wrong moment: nothing is approved unseen, nothing is left running."""

from __future__ import annotations

import asyncio
import sqlite3

import pytest
from a2a.types.a2a_pb2 import ListTasksRequest, TaskPushNotificationConfig, TaskState
from a2a.utils.errors import A2AError, TaskNotFoundError
from tests.support.a2a_ground import Ground, answer, caller, said, state, until, words
from tests.support.langgraph_ground import last_results, runs, says, scripted
from tests.support.slow_way import slow_way

from carrel.integrations.a2a import executor, handler
from carrel.integrations.a2a.push import MOST_CONFIGS
from carrel.integrations.a2a.runs import TaskRuns
from carrel.integrations.langgraph import PendingApproval, open_checkpointer
from carrel.models import ApprovalState


async def test_an_answer_given_twice_approves_once(ground: Ground) -> None:
    """The second waits for the first one's run: what that comes to ask for was never shown to who sent it."""
    script = (runs("sleep 1; uname -s"), runs("uname -r"), lambda seen: says(last_results(seen)[0]))
    async with scripted(*script) as model:
        settings = {"model": "scripted", "base_url": model.url, "approver_token": ground.person_token}
        async with ground.talk(**settings) as one:
            task = await one.send("which system?", context=ground.context)
            first = await ground.pending()
            await asyncio.gather(one.send("approve", task=task.id), one.send("approve", task=task.id))

            async def told() -> bool:
                return "sent before" in words(await one.get(task.id))

            await until(told)
            assert (await ground.owner.approvals.get(first)).state is ApprovalState.APPROVED
            second = await ground.pending()
            assert "uname -r" in words(await one.get(task.id))
            ended = await one.send(f"approve {second}", task=task.id)
            assert state(ended) == "completed"


async def test_an_answer_by_another_is_not_heard(ground: Ground) -> None:
    other_token = await ground.owner.tokens.create("somebody", kind="agent", scopes=["operate"])
    async with (
        ground.agent(approver_token=ground.person_token) as agent,
        caller(agent.url, ground.token) as one,
        caller(agent.url, other_token.token) as other,
    ):
        task = await one.send("uname -s", context=ground.context)
        with pytest.raises(TaskNotFoundError):
            await other.send("approve", task=task.id)
        assert (await ground.owner.approvals.get(await ground.pending())).state is ApprovalState.PENDING


async def test_a_cancel_elsewhere_that_the_sdk_hears_of_first_ends_the_command(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process cancels while a command runs; the next step of the graph is what finds that out."""
    monkeypatch.setattr(executor, "LOOK_S", 300.0)  # or it may be found out before, on a busy machine
    await ground.owner.policy(ground.context).delete()
    script = (runs("while [ ! -e go ]; do sleep 0.05; done"), runs("sleep 300"), says("never"))
    async with scripted(*script) as model:
        settings = {"model": "scripted", "base_url": model.url}
        async with ground.talk(**settings) as one, ground.talk(**settings) as other:
            task = await one.start("wait", context=ground.context)
            box = await ground.owner.sandbox(ground.context)

            async def begun() -> bool:
                return bool([each for each in await box.commands.list() if "go" in each.command])

            await until(begun)
            assert state(await other.cancel(task.id)) == "canceled"
            await box.files.write("go", b"")

            async def asked() -> bool:
                return len(model.requests) == 2

            async def over() -> bool:
                return not [each for each in await box.commands.list() if each.running]

            await until(asked)
            thread = f"{ground.context}/{task.id}"
            async with open_checkpointer(ground.directory / "agent.db") as found, found.running(thread, wait_s=30):
                pass
            await until(over)


async def test_a_cancel_while_a_command_is_being_started_ends_it(ground: Ground) -> None:
    await ground.owner.policy(ground.context).delete()
    async with slow_way(ground.url, "/commands/start") as way, ground.talk(carrel_url=way.url) as one:
        task = await one.start("sleep 300", context=ground.context)
        await asyncio.wait_for(way.held.wait(), 30)
        assert state(await one.cancel(task.id)) == "canceled"
        way.release.set()
        await asyncio.wait_for(way.answered.wait(), 30)

        async def over() -> bool:
            return await ground.programs("sleep") == 0

        await until(over)


async def test_a_new_token_of_the_same_name_finds_the_tasks_of_the_old_one(ground: Ground) -> None:
    async def token(**more: object) -> tuple[str, str]:
        made = await ground.owner.tokens.create("rotates", kind="agent", scopes=["operate"], **more)  # type: ignore[arg-type]
        return made.id, made.token

    reach = {"contexts": [ground.context]}
    (old_id, old), (_, new), (_, wider) = await token(**reach), await token(**reach), await token()
    async with ground.agent() as agent:
        async with caller(agent.url, old) as one:
            done = await one.send("echo hello", context=ground.context)
            waits = await one.send("uname -s", context=ground.context)
            assert (state(done), state(waits)) == ("completed", "input_required")
        await ground.owner.tokens.revoke(old_id)
        async with caller(agent.url, new) as one, caller(agent.url, wider) as other:
            assert {each.id for each in (await one.client.list_tasks(ListTasksRequest())).tasks} == {done.id, waits.id}
            assert not (await other.client.list_tasks(ListTasksRequest())).tasks
            await ground.person.approvals.approve(await ground.pending())

            async def ended() -> bool:
                return state(await one.get(waits.id)) != "input_required"

            await until(ended)
            assert answer(await one.pause(waits.id)) == "Linux"


async def test_a_task_whose_database_failed_when_it_began_to_wait_is_waited_for_again(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    really = TaskRuns.waits

    async def waits(self: TaskRuns, thread: str) -> list[PendingApproval]:
        looked.append(thread)
        if len(looked) == 1:
            raise sqlite3.OperationalError("disk I/O error")
        return await really(self, thread)

    monkeypatch.setattr(TaskRuns, "waits", waits)
    async with ground.talk() as one:
        task = await one.send("uname -s", context=ground.context)
        assert state(task) == "input_required"

        async def failed() -> bool:
            return bool(looked)

        await until(failed)
        await ground.person.approvals.approve(await ground.pending())

        async def ended() -> bool:
            return state(await one.get(task.id)) == "completed"

        await until(ended)


async def test_a_message_brings_no_more_urls_than_a_task_may_tell(ground: Ground) -> None:
    async with ground.talk(push_hosts=("127.0.0.1",)) as one:
        task = await one.send("uname -s", context=ground.context)
        for number in range(MOST_CONFIGS + 1):
            config = TaskPushNotificationConfig(id=f"c{number}", url="http://127.0.0.1:9/")
            sending = one.events(said("hm", task=task.id), task_push_notification_config=config)
            if number < MOST_CONFIGS:
                await sending
                continue
            with pytest.raises(A2AError, match="at most"):
                await sending
        assert (await one.get(task.id)).status.state == TaskState.TASK_STATE_INPUT_REQUIRED


async def test_a_task_does_not_grow_without_end(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler, "MOST_ANSWERS", 2)
    async with ground.talk() as one:
        task = await one.send("uname -s", context=ground.context)
        with pytest.raises(A2AError, match="bytes"):
            await one.send("x" * (handler.LONGEST_ANSWER + 1), task=task.id)
        for _ in range(2):
            assert state(await one.send("hm", task=task.id)) == "input_required"
        with pytest.raises(A2AError, match="takes 2 messages"):
            await one.send("hm", task=task.id)
        assert len(str(await one.get(task.id))) < handler.LONGEST_ANSWER
        assert state(await one.cancel(task.id)) == "canceled"
