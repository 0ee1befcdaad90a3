"""Runs the SDK's tasks as runs of the graph: starts, waits, continues and cancels them, many at the same time.

Only `tasks/cancel` cancels a task. A caller that disconnects does not. When a process ends, its tasks stay as they are,
and another process can continue them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from a2a.helpers import new_text_part
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.context import ServerCallContext
from a2a.server.events import EventQueue
from a2a.types.a2a_pb2 import Message, Task, TaskState

from carrel.errors import (
    CarrelError,
    Denied,
    InvalidRequest,
    LimitExceeded,
    PlatformError,
    ThreadBusy,
    Unauthorized,
)
from carrel.integrations.a2a import messages
from carrel.integrations.a2a.background import Background
from carrel.integrations.a2a.callers import A2aCaller, Callers, caller_of
from carrel.integrations.a2a.inbox import Inbox
from carrel.integrations.a2a.names import carrel_context, task_thread
from carrel.integrations.a2a.runs import RunRequest, TaskRuns
from carrel.integrations.a2a.tasks import TERMINAL, TaskStore
from carrel.integrations.a2a.updates import Updates
from carrel.integrations.langgraph import Checkpoints

log = logging.getLogger("carrel.a2a")

RESUMED = "carrel.resumed"
"""Set in the context of a call that the agent makes to itself, to continue a task."""
SEEN = "carrel.seen"
"""Set in the context of a call: the id of the status message that its caller could see when it sent its message."""
AT_ONCE = 32
"""How many tasks run at the same time; others wait as `submitted`."""
MOST_OF_ONE = 256
"""How many tasks of one caller may run or wait to run; further ones are rejected."""
LOOK_S = 2.0
_TURNED_AWAY = (Denied, InvalidRequest, Unauthorized)

Resume = Callable[[Task, A2aCaller, str], Awaitable[None]]
"""Continues a task, with a text that says why."""


@dataclass
class _Job:
    """A task that runs here."""

    run: asyncio.Task[None]
    canceled: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)


def input_message_id(task: Task) -> str:
    """Return the id of the message with which a task waits for input; empty while it does not wait."""
    waits = task.status.state == TaskState.TASK_STATE_INPUT_REQUIRED
    return str(task.status.message.message_id) if waits else ""


class Executor(AgentExecutor):
    """Runs the tasks of one process."""

    def __init__(
        self,
        runs: TaskRuns,
        checkpoints: Checkpoints,
        kept: TaskStore,
        callers: Callers,
        inbox: Inbox,
        background: Background,
        resume: Resume,
        *,
        at_once: int = AT_ONCE,
    ):
        self._runs = runs
        self._checkpoints = checkpoints
        self._kept = kept
        self._callers = callers
        self._inbox = inbox
        self._background = background
        self._slots = asyncio.Semaphore(at_once)
        self._jobs: dict[str, _Job] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._resuming: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._resume = resume

    def knows(self, task_id: str) -> bool:
        """Return whether a task runs or waits for a person in this process."""
        return task_id in self._jobs or task_id in self._watches or task_id in self._resuming

    async def idle(self, task: Task) -> bool:
        """Return whether no process runs a task."""
        try:
            async with self._checkpoints.running(task_thread(carrel_context(task.context_id), task.id)):
                return True
        except ThreadBusy:
            return False

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Run the task of a message until it has ended or waits for a person."""
        caller = caller_of(context.call_context)
        resumed = context.call_context.state.get(RESUMED) is True
        known = context.current_task
        task_id = context.task_id or ""
        context_id = known.context_id if known is not None else context.context_id or ""
        updates = Updates(event_queue, task_id, context_id, None if known is None else known.status.state)
        new = known is None
        if known is None:
            known = await self._begin(context, caller, updates)
            if known is None:
                return
        self._stop_watching(task_id)
        late = not new and not resumed and context.call_context.state.get(SEEN) != input_message_id(known)
        ask = RunRequest(known, carrel_context(context_id), None if resumed else context.message, updates, new, late)
        self._counts[caller.name] += 1
        job = _Job(asyncio.get_running_loop().create_task(self._run(ask, caller, resumed), name=f"run of {task_id}"))
        self._jobs[task_id] = job
        looking = self._background.start(self._look(task_id, job, context.call_context), f"look after {task_id}")
        try:
            await job.run
        except asyncio.CancelledError:
            # Without a cancel, the process is ending and another one continues the task. The SDK may notice a cancel
            # before `_look` does.
            if not job.canceled and not await self._was_canceled(task_id, context.call_context):
                raise
            await self._canceled(ask, caller)
        finally:
            if looking is not None:
                looking.cancel()
            del self._jobs[task_id]
            self._counts[caller.name] -= 1
            self._counts += Counter()
            job.over.set()

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        """Cancel a task and kill every process it started."""
        task_id, context_id = context.task_id or "", context.context_id or ""
        self._stop_watching(task_id)
        job = self._jobs.get(task_id)
        if job is not None:
            job.canceled = True
            job.run.cancel()
            await job.over.wait()
            return
        updates = Updates(event_queue, task_id, context_id)
        task = context.current_task or Task(id=task_id, context_id=context_id)
        await self._canceled(
            RunRequest(task, carrel_context(context_id), None, updates), caller_of(context.call_context)
        )

    async def kill_left(self, task: Task, caller: A2aCaller) -> None:
        """Kill the commands of a task that does not run in this process."""
        context = carrel_context(task.context_id)
        thread = task_thread(context, task.id)
        async with self._callers.client(caller) as client:
            await self._runs.kill(thread, context, client)

    def wait_again(self, task: Task, caller: A2aCaller) -> None:
        """Wait in the background until an approval that a task waits for is decided."""
        if task.id not in self._watches and task.id not in self._resuming:
            waiting = self._background.start(self._watch(task, caller), f"wait for {task.id}")
            if waiting is not None:
                self._watches[task.id] = waiting

    async def _begin(self, context: RequestContext, caller: A2aCaller, updates: Updates) -> Task | None:
        """Accept a new task, or reject it."""
        message = context.message or Message()
        try:
            name = carrel_context(context.context_id or "")
            messages.text_of(message)
            if self._counts[caller.name] >= MOST_OF_ONE:
                raise LimitExceeded(f"{MOST_OF_ONE} of your tasks are running", hint="wait until some of them end")
        except (InvalidRequest, LimitExceeded) as error:
            await updates.begin(message, TaskState.TASK_STATE_REJECTED, None, messages.failure(error))
            return None
        busy = self._slots.locked()
        state = TaskState.TASK_STATE_SUBMITTED if busy else TaskState.TASK_STATE_WORKING
        await updates.begin(message, state, name)
        return Task(id=context.task_id or "", context_id=context.context_id or "", history=[message])

    async def _run(self, ask: RunRequest, caller: A2aCaller, resumed: bool) -> None:
        """Run a task unless another process does."""
        try:
            async with self._checkpoints.running(ask.thread):
                waits = await self._run_alone(ask, caller, resumed)
        except ThreadBusy:
            if not resumed:
                words = "The task is running: it accepts messages only while it waits for input."
                await ask.updates.status(TaskState.TASK_STATE_WORKING, [new_text_part(words)])
            return
        except PlatformError as error:  # the database of the checkpoints is gone
            await self._fail(ask, error)
            return
        if waits:
            self.wait_again(ask.task, caller)

    async def _run_alone(self, ask: RunRequest, caller: A2aCaller, resumed: bool) -> bool:
        """Run a task until it ends or waits for a person; return whether it waits."""
        try:
            async with self._slots, self._callers.client(caller) as client:
                if resumed and await self._ended(ask.task.id, caller):
                    return False
                if await self._runs.run(ask, client):
                    return True
        except CarrelError as error:
            if resumed and isinstance(error, Unauthorized):
                # The caller's token is no longer valid: the task waits until they ask for it with another token.
                log.info("task %s waits for its caller: %s", ask.task.id, error.detail)
                return False
            await self._fail(ask, error)
        except Exception as error:
            log.exception("task %s failed", ask.task.id)
            words = f"the agent or its model failed ({type(error).__name__})"
            await self._fail(ask, PlatformError(words, hint="the log of the agent says more"))
        await self._forget(ask.thread)
        return False

    async def _forget(self, thread: str) -> None:
        try:
            await self._runs.forget(thread)
        except Exception:  # the task has ended nevertheless
            log.exception("the checkpoints of %s could not be removed", thread)

    async def _fail(self, ask: RunRequest, error: CarrelError) -> None:
        refused = isinstance(error, _TURNED_AWAY) and not ask.task.HasField("status")
        state = TaskState.TASK_STATE_REJECTED if refused else TaskState.TASK_STATE_FAILED
        await ask.updates.status(state, messages.failure(error))

    async def _canceled(self, ask: RunRequest, caller: A2aCaller) -> None:
        await self.kill_left(ask.task, caller)
        await ask.updates.status(
            TaskState.TASK_STATE_CANCELED, [new_text_part("Canceled; all its commands were killed.")]
        )
        self._background.start(self._clear_up(ask, caller), f"clear up after {ask.task.id}")

    async def _clear_up(self, ask: RunRequest, caller: A2aCaller) -> None:
        # A command whose start was on its way when the run was cancelled begins only now.
        for workspace in ask.used:
            await workspace.settled()
        await self.kill_left(ask.task, caller)
        await self._forget(ask.thread)

    async def _look(self, task_id: str, job: _Job, context: ServerCallContext) -> None:
        """Notice that the task was cancelled through another process."""
        while True:
            await asyncio.sleep(LOOK_S)
            if await self._was_canceled(task_id, context):
                job.canceled = True
                job.run.cancel()
                return

    async def _was_canceled(self, task_id: str, context: ServerCallContext) -> bool:
        try:
            stored = await self._kept.tasks.get(task_id, context)
        except Exception as error:  # of either database driver
            log.warning("cannot check whether task %s was cancelled elsewhere: %s", task_id, type(error).__name__)
            return False
        return stored is not None and stored.task.status.state == TaskState.TASK_STATE_CANCELED

    async def _ended(self, task_id: str, caller: A2aCaller) -> bool:
        stored = await self._kept.tasks.get(task_id, ServerCallContext(user=caller))
        return stored is None or stored.task.status.state in TERMINAL

    async def _watch(self, task: Task, caller: A2aCaller) -> None:
        try:
            waiting = await self._runs.waits(task_thread(carrel_context(task.context_id), task.id))
            if waiting:
                await self._inbox.decided(caller, [each.approval for each in waiting])
        except Exception:  # of either database driver: the wait starts again when the caller asks for the task
            self._watches.pop(task.id, None)
            raise
        # Until its next run the task counts as known here; otherwise a request would continue it a second time.
        self._resuming.add(task.id)
        try:
            self._watches.pop(task.id, None)
            await self._resume(task, caller, "The approval was decided; continuing.")
        finally:
            self._resuming.discard(task.id)

    def _stop_watching(self, task_id: str) -> None:
        watch = self._watches.pop(task_id, None)
        if watch is not None:
            watch.cancel()
