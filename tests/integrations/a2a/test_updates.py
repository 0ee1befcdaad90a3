"""What a task tells of itself."""

from __future__ import annotations

from a2a.helpers import new_text_part
from a2a.server.events import EventQueue
from a2a.server.events.event_queue import Event
from a2a.types.a2a_pb2 import Artifact, Message, Task, TaskState

from carrel.integrations.a2a.updates import MOST_STEPS, Updates


class Told(EventQueue):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    async def enqueue_event(self, event: Event) -> None:
        self.events.append(event)


async def test_nothing_follows_an_end() -> None:
    told = Told()
    updates = Updates(told, "t", "c")
    await updates.begin(Message(message_id="m"), TaskState.TASK_STATE_WORKING, "ctx")
    await updates.working()
    await updates.status(TaskState.TASK_STATE_FAILED, [new_text_part("it broke")])
    await updates.status(TaskState.TASK_STATE_COMPLETED)
    await updates.artifact(Artifact(artifact_id="late"))
    [task, failed] = told.events
    assert isinstance(task, Task)
    assert task.metadata["carrel_context"] == "ctx"
    assert task.status.HasField("timestamp")
    assert failed.status.message.parts[0].text == "it broke"  # type: ignore[union-attr]


async def test_that_it_runs_is_said_once_or_again() -> None:
    told = Told()
    updates = Updates(told, "t", "c", TaskState.TASK_STATE_INPUT_REQUIRED)
    await updates.working()
    await updates.working()
    assert len(told.events) == 1
    await updates.working(again=True)
    assert len(told.events) == 2


async def test_steps_are_told_up_to_a_measure() -> None:
    told = Told()
    updates = Updates(told, "t", "c")
    for number in range(MOST_STEPS + 10):
        await updates.step(str(number))
    assert len(told.events) == MOST_STEPS


async def test_a_task_that_is_turned_away_has_ended() -> None:
    told = Told()
    updates = Updates(told, "t", "c")
    await updates.begin(Message(message_id="m"), TaskState.TASK_STATE_REJECTED, None, [new_text_part("no")])
    await updates.status(TaskState.TASK_STATE_WORKING)
    assert len(told.events) == 1
