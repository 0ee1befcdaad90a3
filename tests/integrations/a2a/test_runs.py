"""Runs with a model: several steps, what the conversation remembers, several approvals at once, and failures."""

from __future__ import annotations

from a2a.helpers import new_data_part
from a2a.types.a2a_pb2 import TaskState
from tests.support.a2a_ground import Ground, answer, said, state, words
from tests.support.langgraph_ground import last_results, runs, says, scripted


async def test_a_model_works_in_steps_that_are_told(ground: Ground) -> None:
    script = (
        runs("echo one > output.txt", "echo two"),
        runs("cat output.txt"),
        lambda seen: says(f"it says {last_results(seen)}"),
    )
    async with (
        scripted(*script) as model,
        ground.talk(streaming=True, model="scripted", base_url=model.url) as one,
    ):
        events = await one.events(said("what does it say?", context=ground.context))
        steps = [part.text for event in events for part in event.status_update.status.message.parts]
        assert steps == ["run_command: echo one > output.txt", "run_command: echo two", "run_command: cat output.txt"]
        assert answer(await one.get(events[0].task.id)) == "it says ['one']"


async def test_a_conversation_is_remembered_by_the_next_task(ground: Ground) -> None:
    def count(seen: list[dict[str, object]]) -> dict[str, object]:
        asked = [str(message["content"]) for message in seen if message["role"] == "user"]
        return says(f"asked {asked}")

    async with scripted(count, count, count) as model:
        async with ground.talk(model="scripted", base_url=model.url) as one:
            assert answer(await one.send("first", context=ground.context)) == "asked ['first']"
            assert answer(await one.send("second", context=ground.context)) == "asked ['first', 'second']"
        async with ground.talk(model="scripted", base_url=model.url) as other:
            assert answer(await other.send("third", context=ground.context)) == "asked ['first', 'second', 'third']"


async def test_a_run_asks_for_its_sandbox_once(ground: Ground) -> None:
    async with ground.talk() as one:
        assert answer(await one.send("echo hi", context=ground.context)) == "hi"
    made = [each async for each in ground.owner.audit.search(context_id=ground.context, name="deploy_or_resume")]
    assert len(made) == 1


async def test_of_several_that_wait_one_is_denied_and_one_approved(ground: Ground) -> None:
    async with scripted(runs("uname -s", "uname -r"), lambda seen: says("\n".join(last_results(seen, 2)))) as model:
        settings = {"model": "scripted", "base_url": model.url, "approver_token": ground.person_token}
        async with ground.talk(**settings) as one:
            task = await one.send("which system?", context=ground.context)
            assert state(task) == "input_required"
            found = [part.data.struct_value for part in task.status.message.parts if part.HasField("data")]
            by_command = {each["summary"]: str(each["approval"]) for each in found}
            assert set(by_command) == {"uname -s", "uname -r"}
            assert "name the approval" in words(await one.send("approve", task=task.id))
            left = await one.send(f"deny {by_command['uname -r']} not that", task=task.id)
            assert state(left) == "input_required"
            data = new_data_part({"decision": "approve", "approval": by_command["uname -s"]})
            ended = await one.send(data, task=task.id)
            assert ended.status.state == TaskState.TASK_STATE_COMPLETED
            assert "Linux" in answer(ended)
            assert "not that" in answer(ended)


async def test_a_model_that_fails_fails_the_task_in_words(ground: Ground) -> None:
    async with scripted() as model, ground.talk(model="scripted", base_url=model.url) as one:
        task = await one.send("hello", context=ground.context)
        assert state(task) == "failed"
        assert "the agent or its model failed" in words(task)


async def test_a_server_that_is_away_fails_the_task_in_words(ground: Ground) -> None:
    made = await ground.owner.tokens.create("gone", kind="agent", scopes=["operate"])
    async with ground.talk(token=made.token) as one:
        task = await one.send("uname -s", context=ground.context)
        assert state(task) == "input_required"
        await ground.owner.tokens.revoke(made.id)
        ended = await one.send("deny", task=task.id)
        assert state(ended) == "failed"
        assert "token" in words(ended)
