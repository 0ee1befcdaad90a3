"""One run of the graph for one task: from its start, from a person's answer, or from where another process stopped.

Knows the graph and the workspace; it reports through `Updates`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from a2a.helpers import new_data_part, new_text_part
from a2a.types.a2a_pb2 import Artifact, Message, Role, Task, TaskState
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.errors import GraphRecursionError
from langgraph.types import Command, StateSnapshot

from carrel.client import AsyncClient, AsyncSandbox
from carrel.errors import CarrelError, LimitExceeded, ServerUnreachable
from carrel.integrations.a2a import artifacts, messages
from carrel.integrations.a2a.conversations import Conversations
from carrel.integrations.a2a.names import task_thread
from carrel.integrations.a2a.tasks import TaskStore
from carrel.integrations.a2a.updates import Updates
from carrel.integrations.langgraph import PendingApproval, Workspace, answer, at_rest, pending
from carrel.integrations.langgraph.graph import Graph
from carrel.integrations.langgraph.workspace import commands_of
from carrel.primitives.backoff import Backoff

log = logging.getLogger("carrel.a2a")

ANSWER = "answer"
TRIES = 5
"""How often a run is tried when carrel cannot be reached. No operation is repeated."""
LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True)
class RunRequest:
    """A request to run a task. `message` is None when there is no new message and the task only continues.

    `late` is true for a message that was sent before the task asked its current question. `used` collects the
    workspaces of the run.
    """

    task: Task
    context: str
    message: Message | None
    updates: Updates
    new: bool = False
    late: bool = False
    used: list[Workspace] = field(default_factory=list)

    @property
    def thread(self) -> str:
        """The thread of the task."""
        return task_thread(self.context, self.task.id)

    @property
    def config(self) -> RunnableConfig:
        """The thread as the graph's configuration."""
        return {"configurable": {"thread_id": self.thread}}


_EMPTY = StateSnapshot({}, (), {"configurable": {}}, None, None, None, (), ())


class _NothingToRun(Exception):
    """The caller was told why there is nothing to run."""


class TaskRuns:
    """Runs tasks."""

    def __init__(
        self,
        graph: Graph,
        conversations: Conversations,
        store: TaskStore,
        *,
        approver: AsyncClient | None = None,
        speaks: bool = True,
        pause_s: float = 1.0,
    ):
        # Without a language model there are no steps to report, and no conversation to continue.
        self._speaks = speaks
        self._graph = graph
        self._conversations = conversations
        self._store = store
        self._approver = approver
        self._pause_s = pause_s

    async def run(self, ask: RunRequest, client: AsyncClient) -> list[PendingApproval]:
        """Run until the task has ended or waits for a person; return the approvals it waits for."""
        box = await client.sandbox(ask.context)
        before = await self._before(ask, box)
        state = _EMPTY if ask.new else await self._graph.aget_state(ask.config)
        workspace = Workspace(client, context_id=ask.context, approver=self._approver)
        workspace.reuse_soon(box)
        ask.used.append(workspace)
        try:
            if not _over(state):
                given = await self._input(ask, state)
                await self._go(ask, given, workspace)
                state = await self._graph.aget_state(ask.config)
        except _NothingToRun:
            return list(pending(state).values())
        waiting = list(pending(state).values())
        if waiting:
            parts = messages.waiting(waiting, decides=self._approver is not None)
            await ask.updates.status(TaskState.TASK_STATE_INPUT_REQUIRED, parts)
        else:
            await self._finish(ask, client, box, state, before)
        return waiting

    async def waits(self, thread: str) -> list[PendingApproval]:
        """Return the approvals that a thread waits for."""
        state = await self._graph.aget_state({"configurable": {"thread_id": thread}})
        return list(pending(state).values())

    @staticmethod
    async def kill(thread: str, context: str, client: AsyncClient) -> None:
        """Kill the commands of a task with everything they started, also those that an ended process has left."""
        try:
            box = client.attach(await client.find(context))
            mine = [each.id for each in await box.commands.list() if each.id.startswith(commands_of(thread))]
        except CarrelError as error:
            log.info("the commands of %s cannot be killed: %s", thread, error.detail)
            return
        for each in mine:
            try:
                await box.commands.get(each).kill()
            except CarrelError as error:
                log.info("command %s of %s cannot be killed: %s", each, thread, error.detail)

    async def forget(self, thread: str) -> None:
        """Delete the checkpoints of a task that has ended."""
        await self._conversations.drop(thread)

    async def _before(self, ask: RunRequest, box: AsyncSandbox) -> artifacts.Listing:
        before = None if ask.new else await self._store.initial_files(ask.task.id)
        if before is None:
            before = artifacts.marks((await artifacts.listing(box))[0])
            await self._store.save_initial_files(ask.task.id, before)
        return before

    async def _input(self, ask: RunRequest, state: StateSnapshot) -> dict[str, object] | Command[Any] | None:
        """Return the input of the graph. Raises `_NothingToRun` after telling the caller why."""
        if not state.values:
            said = HumanMessage(messages.text_of(_first(ask.task)), id=_first_id(ask.task))
            before = await self._conversations.read(ask.context) if self._speaks else []
            return {"messages": [*before, said]}
        waiting = pending(state)
        if not waiting:
            return None
        if ask.message is None:
            return answer(state, "look")
        problem, decision = self._read(ask, ask.message, list(waiting.values()))
        if decision is None:
            parts = messages.waiting(waiting.values(), decides=self._approver is not None, said=problem)
            await ask.updates.status(TaskState.TASK_STATE_INPUT_REQUIRED, parts)
            raise _NothingToRun
        return answer(state, decision.decision, message=decision.message, approval=decision.approval)

    def _read(
        self, ask: RunRequest, message: Message, waiting: Sequence[PendingApproval]
    ) -> tuple[str | None, messages.Decision | None]:
        """Return a person's decision, or why the message is not one."""
        decision = messages.decision_of(message)
        if decision is None:
            return "This is neither `approve` nor `deny`.", None
        if decision.approval is None and ask.late:
            return "This was sent before the task asked its current question.", None
        if decision.approval is None and len(waiting) > 1:
            return "Several operations wait: name the approval that you mean.", None
        if decision.approval is not None and all(each.approval != decision.approval for each in waiting):
            return f"The task does not wait for {decision.approval}.", None
        if decision.decision == "approve" and self._approver is None:
            return "This agent may not approve its own requests.", None
        return None, decision

    async def _go(self, ask: RunRequest, given: dict[str, object] | Command[Any] | None, workspace: Workspace) -> None:
        await ask.updates.working(again=ask.message is None)
        backoff = Backoff(self._pause_s, LONGEST_PAUSE_S)
        for attempt in range(TRIES):
            try:
                stream = self._graph.astream(
                    given, ask.config, context=workspace, stream_mode="updates", durability="sync"
                )
                async for update in stream:
                    for line in messages.steps(update):
                        if self._speaks:
                            await ask.updates.step(line)
                return
            except ServerUnreachable:
                if attempt + 1 == TRIES:
                    raise
                await asyncio.sleep(backoff.next_pause())
                if not isinstance(given, Command):  # an answer that did not arrive is sent again
                    given = None
            except GraphRecursionError:
                raise LimitExceeded("the model did not finish within its steps", hint="ask for less at once") from None

    async def _finish(
        self, ask: RunRequest, client: AsyncClient, box: AsyncSandbox, state: StateSnapshot, before: artifacts.Listing
    ) -> None:
        said = _own(messages.messages_in(state.values), _first_id(ask.task))
        await self._conversations.add(ask.context, said)
        final = Artifact(artifact_id=ANSWER, name=ANSWER, parts=[new_text_part(messages.answer(said))])
        result = messages.results(said)
        if result is not None:
            final.parts.append(new_data_part(result, media_type=messages.JSON))
        await ask.updates.artifact(final)
        found = await artifacts.changed(box, before)
        async for artifact in artifacts.artifacts(box, client.url, found):
            await ask.updates.artifact(artifact)
        await ask.updates.status(TaskState.TASK_STATE_COMPLETED)


def _over(state: StateSnapshot) -> bool:
    return bool(state.values) and at_rest(state)


def _first(task: Task) -> Message:
    users: list[Message] = [message for message in task.history if message.role == Role.ROLE_USER]
    return users[0]


def _first_id(task: Task) -> str:
    return f"task-{task.id}"


def _own(messages: Sequence[BaseMessage], first: str) -> list[BaseMessage]:
    """Return the messages of this task, without those of the conversation before it."""
    for place, message in enumerate(messages):
        if message.id == first:
            return list(messages[place:])
    return list(messages)
