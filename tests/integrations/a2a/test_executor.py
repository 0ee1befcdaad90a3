"""Tasks as a caller sees them, with the official client: they end, wait, go on, are cancelled, and run side by side."""

from __future__ import annotations

import asyncio

import pytest
from a2a.types.a2a_pb2 import ListTasksRequest, SendMessageRequest, SubscribeToTaskRequest, TaskState
from a2a.utils.errors import TaskNotFoundError, UnsupportedOperationError
from tests.support.a2a_ground import Ground, answer, caller, files, said, state, until, words

from carrel.models import ApprovalState


async def test_a_command_and_its_files_come_back(ground: Ground) -> None:
    async with ground.talk() as one:
        task = await one.send(
            "mkdir -p output/deep && echo made > output/deep/a.txt && echo done", context=ground.context
        )
        assert (state(task), answer(task)) == ("completed", "done")
        assert files(task) == {"output/deep/a.txt": b"made\n"}
        assert task.metadata["carrel_context"] == ground.context
        again = await one.send("cat output/deep/a.txt; echo x > output/b.txt", context=ground.context)
        assert (answer(again), files(again)) == ("made", {"output/b.txt": b"x\n"})
        assert state(await one.get(task.id)) == "completed"


async def test_a_failing_command_is_a_result(ground: Ground) -> None:
    async with ground.talk() as one:
        task = await one.send("echo before; exit 3", context=ground.context)
        assert state(task) == "completed"
        assert "before" in answer(task)
        [final] = [each for each in task.artifacts if each.artifact_id == "answer"]
        assert final.parts[1].data.struct_value["exit_code"] == 3


async def test_what_policy_denies_is_said(ground: Ground) -> None:
    async with ground.talk() as one:
        task = await one.send("curl example.org", context=ground.context)
        assert state(task) == "completed"
        assert "shell(curl:*)" in answer(task)


async def test_a_stream_tells_the_steps(ground: Ground) -> None:
    async with ground.talk(streaming=True) as one:
        events = await one.events(said("echo hello", context=ground.context))
        kinds = [event.WhichOneof("payload") for event in events]
        assert kinds[0] == "task"
        assert kinds[-1] == "status_update"
        assert events[-1].status_update.status.state == TaskState.TASK_STATE_COMPLETED
        shown = [event.artifact_update.artifact for event in events if event.HasField("artifact_update")]
        assert [each.parts[0].text for each in shown] == ["hello"]
        steps = [part.text for event in events for part in event.status_update.status.message.parts]
        assert steps == []


async def test_a_message_without_text_is_turned_away(ground: Ground) -> None:
    async with ground.talk() as one:
        task = await one.send("   ", context=ground.context)
        assert state(task) == "rejected"
        assert "no text" in words(task)


async def test_a_context_out_of_reach_is_turned_away(ground: Ground) -> None:
    narrow = await ground.owner.tokens.create("narrow", kind="agent", scopes=["operate"], contexts=[ground.context])
    async with ground.talk(token=narrow.token) as one:
        refused = await one.send("echo hello", context="somebody-elses")
        assert state(refused) == "rejected"
        assert state(await one.send("echo hello", context=ground.context)) == "completed"


# --- waiting for a person


async def test_the_inbox_approves_and_the_task_goes_on_by_itself(ground: Ground) -> None:
    async with ground.talk() as one:
        task = await one.send("uname -s", context=ground.context)
        assert state(task) == "input_required"
        assert "uname -s" in words(task)
        shown = task.status.message.parts[1].data.struct_value
        assert (shown["type"], shown["operation"], shown["decide"]) == ("approval", "shell", False)
        approval = str(shown["approval"])
        assert f"carrel approve {approval}" in words(task)
        told = await one.send("approve", task=task.id)
        assert state(told) == "input_required"
        assert "may not approve" in words(told)
        await ground.person.approvals.approve(approval)
        ended = await one.pause(task.id, states={TaskState.TASK_STATE_COMPLETED})
        assert answer(ended) == "Linux"
        assert (await ground.owner.approvals.get(approval)).used_at is not None


async def test_the_inbox_denies_and_the_graph_is_told(ground: Ground) -> None:
    async with ground.talk() as one:
        task = await one.send("uname -s", context=ground.context)
        await ground.person.approvals.deny(await ground.pending(), message="not on my machine")
        ended = await one.pause(task.id, states={TaskState.TASK_STATE_COMPLETED})
        assert "not on my machine" in answer(ended)


async def test_an_answer_approves_with_the_approvers_token(ground: Ground) -> None:
    async with ground.talk(approver_token=ground.person_token) as one:
        task = await one.send("uname -s", context=ground.context)
        assert "Answer `approve`" in words(task)
        approval = await ground.pending()
        unclear = await one.send("approve, but only if it is harmless", task=task.id)
        assert state(unclear) == "input_required"
        assert (await ground.owner.approvals.get(approval)).state is ApprovalState.PENDING
        other = await one.send("approve apr-0000", task=task.id)
        assert "does not wait for apr-0000" in words(other)
        ended = await one.send("approve", task=task.id)
        assert (state(ended), answer(ended)) == ("completed", "Linux")
        assert (await ground.owner.approvals.get(approval)).decided_by == f"person:person-{ground.context}"


@pytest.mark.parametrize("approver", [False, True])
async def test_an_answer_denies_with_or_without_an_approver(ground: Ground, approver: bool) -> None:
    async with ground.talk(approver_token=ground.person_token if approver else None) as one:
        task = await one.send("uname -s", context=ground.context)
        ended = await one.send("deny: too risky", task=task.id)
        assert state(ended) == "completed"
        assert "too risky" in answer(ended)


async def test_a_stream_ends_where_a_task_waits_and_can_be_taken_up(ground: Ground) -> None:
    async with ground.talk(streaming=True) as one:
        events = await one.events(said("uname -s", context=ground.context))
        assert events[-1].status_update.status.state == TaskState.TASK_STATE_INPUT_REQUIRED
        name = events[0].task.id
        states: list[int] = []

        async def follow() -> None:
            async for event in one.client.subscribe(SubscribeToTaskRequest(id=name)):
                found = event.task.status if event.HasField("task") else event.status_update.status
                states.append(found.state)

        async with asyncio.TaskGroup() as group:
            group.create_task(follow())

            async def begun() -> bool:
                return bool(states)

            await until(begun)
            await ground.person.approvals.approve(await ground.pending())
        assert states[0] == TaskState.TASK_STATE_INPUT_REQUIRED
        assert states[-1] == TaskState.TASK_STATE_COMPLETED


async def test_who_follows_a_task_as_the_inbox_decides_sees_its_end(ground: Ground) -> None:
    async with ground.talk(streaming=True) as one:
        for command in ("uname -s", "uname -r", "uname -m"):
            events = await one.events(said(command, context=ground.context))
            await ground.person.approvals.approve(await ground.pending())
            try:
                stream = one.client.subscribe(SubscribeToTaskRequest(id=events[0].task.id))
                states = [event.status_update.status.state async for event in stream if event.HasField("status_update")]
            except UnsupportedOperationError:  # it was quicker
                states = [(await one.get(events[0].task.id)).status.state]
            assert states[-1] == TaskState.TASK_STATE_COMPLETED


# --- cancelling, and many at once


async def test_cancel_kills_the_tree_of_the_command(ground: Ground) -> None:
    await ground.owner.policy(ground.context).delete()
    async with ground.talk() as one:
        task = await one.start("sleep 300 & (setsid sleep 300 &) ; sleep 300", context=ground.context)

        async def runs() -> bool:
            return await ground.programs("sleep") == 3

        await until(runs)
        canceled = await one.cancel(task.id)
        assert state(canceled) == "canceled"
        assert await ground.programs("sleep") == 0
        assert state(await one.get(task.id)) == "canceled"


async def test_cancel_of_a_task_that_waits(ground: Ground) -> None:
    async with ground.talk() as one:
        task = await one.send("uname -s", context=ground.context)
        assert state(await one.cancel(task.id)) == "canceled"
        await ground.person.approvals.approve(await ground.pending())
        assert state(await one.get(task.id)) == "canceled"


async def test_a_caller_who_goes_away_cancels_nothing(ground: Ground) -> None:
    async with ground.agent() as agent:
        async with caller(agent.url, ground.token, streaming=True) as gone:
            request = SendMessageRequest(message=said("sleep 1; echo late", context=ground.context))
            stream = gone.client.send_message(request)
            first = await anext(aiter(stream))
            await stream.aclose()  # type: ignore[attr-defined]
        async with caller(agent.url, ground.token) as back:
            assert answer(await back.pause(first.task.id)) == "late"


async def test_tasks_of_one_context_run_side_by_side(ground: Ground) -> None:
    """Each waits for all others to have begun: one after the other they would never end."""
    wait = "echo x > began-{0}; while [ $(echo began-* | wc -w) -lt 8 ]; do sleep 0.05; done; echo task {0}"
    await ground.owner.policy(ground.context).delete()
    async with ground.talk() as one:
        tasks = await asyncio.gather(*(one.send(wait.format(i), context=ground.context) for i in range(8)))
        assert {answer(task) for task in tasks} == {f"task {i}" for i in range(8)}
        assert {state(task) for task in tasks} == {"completed"}
        page = await one.client.list_tasks(ListTasksRequest(context_id=ground.context))
        assert {task.id for task in page.tasks} == {task.id for task in tasks}


async def test_more_tasks_than_may_run_wait_for_their_turn(ground: Ground) -> None:
    async with ground.talk(at_once=1) as one:
        first = await one.start("sleep 0.5; echo first", context=ground.context)
        second = await one.start("echo second", context=ground.context)
        assert (state(first), state(second)) == ("working", "submitted")
        assert answer(await one.pause(second.id)) == "second"


async def test_callers_do_not_see_each_others_tasks(ground: Ground, server: dict[str, str]) -> None:
    async with (
        ground.agent() as agent,
        caller(agent.url, ground.token) as one,
        caller(agent.url, server["token"]) as other,
    ):
        task = await one.send("echo mine", context=ground.context)
        with pytest.raises(TaskNotFoundError):
            await other.get(task.id)
        with pytest.raises(TaskNotFoundError):
            await other.cancel(task.id)
        assert not (await other.client.list_tasks(ListTasksRequest())).tasks
