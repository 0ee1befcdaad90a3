"""The SDK's request handler, extended: the tasks of a process that has ended continue here when their caller asks for
them, because only the caller has the token that they need.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from a2a.helpers import new_text_part
from a2a.server.agent_execution.active_task import ActiveTask
from a2a.server.agent_execution.active_task_registry import ActiveTaskRegistry
from a2a.server.context import ServerCallContext
from a2a.server.events import Event
from a2a.server.request_handlers import DefaultRequestHandlerV2
from a2a.types.a2a_pb2 import (
    AgentCard,
    CancelTaskRequest,
    GetTaskRequest,
    ListTasksRequest,
    ListTasksResponse,
    Message,
    Role,
    SendMessageConfiguration,
    SendMessageRequest,
    SubscribeToTaskRequest,
    Task,
    TaskPushNotificationConfig,
    TaskState,
)
from a2a.utils.errors import A2AError, InvalidParamsError

from carrel.errors import CarrelError
from carrel.integrations.a2a.background import Background
from carrel.integrations.a2a.callers import A2aCaller, caller_of
from carrel.integrations.a2a.executor import RESUMED, SEEN, Executor, Resume, input_message_id
from carrel.integrations.a2a.names import LONGEST
from carrel.integrations.a2a.push import Push
from carrel.integrations.a2a.tasks import TERMINAL, TaskStore

log = logging.getLogger("carrel.a2a")

MOST_ANSWERS = 100
LONGEST_ANSWER = 20_000
"""Messages to one task, and the bytes of each. All of them stay in the task's history."""
IDLE_S = 600.0
"""How long a task that waits for a person stays in memory."""


class _Registry(ActiveTaskRegistry):
    """The SDK's registry of running tasks. It also closes the event queues of a task that could not be started."""

    async def _remove_task(self, active_task: ActiveTask) -> None:
        await super()._remove_task(active_task)
        if active_task._producer_task is None:  # never started, so nothing else closes its queues
            await active_task.aclose()


class Handler(DefaultRequestHandlerV2):
    """Handles every request of the protocol."""

    def __init__(
        self,
        make_executor: Callable[[Resume], Executor],
        kept: TaskStore,
        card: AgentCard,
        push: Push,
        background: Background,
    ):
        executor = make_executor(self._resume)
        super().__init__(
            executor,
            kept.tasks,
            card,
            push_config_store=kept.push,
            push_sender=push,
            push_url_validator=push.check,
            event_stream=kept.events,
            interrupted_task_timeout=IDLE_S,
        )
        self._active_task_registry = _Registry(executor, kept.tasks, push, kept.events, IDLE_S)
        self._executor = executor
        self._kept = kept
        self._push = push
        self._background = background
        self._reviving: set[str] = set()

    async def on_message_send(self, params: SendMessageRequest, context: ServerCallContext) -> Message | Task:
        """Accept a message and wait for the result."""
        await self._prepare(params, context)
        sent: Message | Task = await super().on_message_send(params, context)
        return sent

    async def on_message_send_stream(
        self, params: SendMessageRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event, None]:
        """Accept a message and stream the events of its task."""
        await self._prepare(params, context)
        async with aclosing(super().on_message_send_stream(params, context)) as events:
            async for event in events:
                yield event

    async def on_get_task(self, params: GetTaskRequest, context: ServerCallContext) -> Task | None:
        """Get a task."""
        task: Task | None = await super().on_get_task(params, context)
        if task is not None:
            self._revive_soon(task, context)
        return task

    async def on_list_tasks(self, params: ListTasksRequest, context: ServerCallContext) -> ListTasksResponse:
        """List the caller's tasks."""
        page: ListTasksResponse = await super().on_list_tasks(params, context)
        for task in page.tasks:
            self._revive_soon(task, context)
        return page

    async def on_subscribe_to_task(
        self, params: SubscribeToTaskRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event, None]:
        """Stream the events of a task from now on."""
        stored = await self._kept.tasks.get(params.id, context)
        if stored is not None:
            await self._revive(stored.task, caller_of(context))
        async with aclosing(super().on_subscribe_to_task(params, context)) as events:
            async for event in events:
                yield event

    async def on_cancel_task(self, params: CancelTaskRequest, context: ServerCallContext) -> Task | None:
        """Cancel a task, in whichever process it runs, and also when its process has ended."""
        canceled: Task | None = await super().on_cancel_task(params, context)
        if canceled is not None and not self._executor.knows(canceled.id) and await self._executor.idle(canceled):
            await self._executor.kill_left(canceled, caller_of(context))
        return canceled

    async def on_create_task_push_notification_config(
        self, params: TaskPushNotificationConfig, context: ServerCallContext
    ) -> TaskPushNotificationConfig:
        """Store a URL for push notifications of a task."""
        await self._room_for(params.task_id, params, context)
        stored: TaskPushNotificationConfig = await super().on_create_task_push_notification_config(params, context)
        return stored

    async def _prepare(self, params: SendMessageRequest, context: ServerCallContext) -> None:
        if len(params.message.context_id) > LONGEST:
            raise InvalidParamsError(message=f"a context id has at most {LONGEST} characters")
        if params.message.role == Role.ROLE_AGENT:  # for this agent every caller is a user
            params.message.role = Role.ROLE_USER
        stored = await self._kept.tasks.get(params.message.task_id, context) if params.message.task_id else None
        if stored is None:
            return
        if params.message.ByteSize() > LONGEST_ANSWER:
            raise InvalidParamsError(message=f"a message to a task has at most {LONGEST_ANSWER} bytes")
        if sum(each.role == Role.ROLE_USER for each in stored.task.history) > MOST_ANSWERS:
            raise InvalidParamsError(message=f"a task takes {MOST_ANSWERS} messages; decide in the inbox, or cancel it")
        context.state[SEEN] = input_message_id(stored.task)
        if params.configuration.HasField("task_push_notification_config"):
            await self._room_for(stored.task.id, params.configuration.task_push_notification_config, context)
        if not params.message.context_id:
            # A task has one context; the SDK would create another for a message that names only the task.
            params.message.context_id = stored.task.context_id

    async def _room_for(self, task_id: str, config: TaskPushNotificationConfig, context: ServerCallContext) -> None:
        known = await self._kept.push.get_info(task_id, context)
        if config.id in {each.id for each in known}:
            return
        try:
            self._push.room(len(known))
        except CarrelError as error:
            raise InvalidParamsError(message=str(error)) from None

    def _revive_soon(self, task: Task, context: ServerCallContext) -> None:
        if task.status.state not in TERMINAL and not self._executor.knows(task.id):
            self._background.start(self._revive(task, caller_of(context)), f"go on with {task.id}")

    async def _revive(self, task: Task, caller: A2aCaller) -> None:
        """Continue a task that no process runs."""
        if task.status.state in TERMINAL or self._executor.knows(task.id) or task.id in self._reviving:
            return
        self._reviving.add(task.id)
        try:
            if task.status.state == TaskState.TASK_STATE_INPUT_REQUIRED:
                self._executor.wait_again(task, caller)
            elif await self._executor.idle(task):
                await self._resume(task, caller, "The process that ran this task has ended; continuing in another.")
        finally:
            self._reviving.discard(task.id)

    async def _resume(self, task: Task, caller: A2aCaller, words: str) -> None:
        """Send a task a message from the agent itself, so that it checks its state and continues."""
        message = Message(
            role=Role.ROLE_AGENT,
            message_id=str(uuid.uuid4()),
            task_id=task.id,
            context_id=task.context_id,
            parts=[new_text_part(words)],
        )
        state: dict[str, Any] = {RESUMED: True}
        request = SendMessageRequest(message=message, configuration=SendMessageConfiguration(return_immediately=True))
        try:
            await super().on_message_send(request, ServerCallContext(user=caller, state=state))
        except A2AError as error:  # it has ended meanwhile
            log.info("task %s does not continue: %s", task.id, error.message)
