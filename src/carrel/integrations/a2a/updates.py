"""Reports the state of a task as events of the SDK. No event follows the end of a task."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import UTC, datetime

from a2a.helpers import new_text_part
from a2a.server.events import EventQueue
from a2a.types.a2a_pb2 import (
    Artifact,
    Message,
    Part,
    Role,
    Task,
    TaskArtifactUpdateEvent,
    TaskState,
    TaskStatus,
    TaskStatusUpdateEvent,
)

from carrel.integrations.a2a.tasks import TERMINAL

MOST_STEPS = 200
"""The first steps of a task are reported one by one, and stay in its history."""


class Updates:
    """The events of one task."""

    def __init__(self, queue: EventQueue, task_id: str, context_id: str, state: TaskState | None = None):
        self._queue = queue
        self._state = state
        self._task_id = task_id
        self._context_id = context_id
        self._steps = 0
        self.ended = False

    async def begin(
        self, message: Message, state: TaskState, carrel_context: str | None, parts: Sequence[Part] = ()
    ) -> None:
        """Report a new task, which begins or is rejected."""
        task = Task(id=self._task_id, context_id=self._context_id, history=[message], status=self._status(state, parts))
        if carrel_context is not None:
            task.metadata.update({"carrel_context": carrel_context})
        self._state, self.ended = state, state in TERMINAL
        await self._queue.enqueue_event(task)

    async def status(self, state: TaskState, parts: Sequence[Part] = ()) -> None:
        """Report a new state."""
        if self.ended:
            return
        self._state, self.ended = state, state in TERMINAL
        event = TaskStatusUpdateEvent(
            task_id=self._task_id, context_id=self._context_id, status=self._status(state, parts)
        )
        await self._queue.enqueue_event(event)

    async def working(self, *, again: bool = False) -> None:
        """Report that the task runs, unless that was reported; with `again` report it anyway."""
        if again or self._state != TaskState.TASK_STATE_WORKING:
            await self.status(TaskState.TASK_STATE_WORKING)

    async def step(self, line: str) -> None:
        """Report what the task does now."""
        self._steps += 1
        if self._steps <= MOST_STEPS:
            await self.status(TaskState.TASK_STATE_WORKING, [new_text_part(line)])

    async def artifact(self, artifact: Artifact) -> None:
        """Report a result of the task. A later one with the same id replaces it."""
        if not self.ended:
            event = TaskArtifactUpdateEvent(
                task_id=self._task_id, context_id=self._context_id, artifact=artifact, last_chunk=True
            )
            await self._queue.enqueue_event(event)

    def _status(self, state: TaskState, parts: Sequence[Part]) -> TaskStatus:
        status = TaskStatus(state=state)
        status.timestamp.FromDatetime(datetime.now(UTC))
        if parts:
            status.message.CopyFrom(
                Message(
                    role=Role.ROLE_AGENT,
                    message_id=str(uuid.uuid4()),
                    task_id=self._task_id,
                    context_id=self._context_id,
                    parts=parts,
                )
            )
        return status
