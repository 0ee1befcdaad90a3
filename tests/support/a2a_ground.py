"""What tests of the A2A agent stand on: the official client, agents in this process and in processes of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx
from a2a.client import Client, ClientConfig, ClientFactory
from a2a.types.a2a_pb2 import (
    CancelTaskRequest,
    GetTaskRequest,
    Message,
    Part,
    Role,
    SendMessageConfiguration,
    SendMessageRequest,
    StreamResponse,
    Task,
    TaskState,
)
from a2a.utils.constants import TransportProtocol
from tests.support.fork_server import AGENT, start

from carrel.client import AsyncClient
from carrel.integrations.a2a import AgentSettings, RunningAgent, running
from carrel.integrations.a2a.tasks import TERMINAL
from carrel.integrations.langgraph import resolve_model

POLICY = {
    "permissions": {
        "allow": [
            "shell(echo:*)", "shell(cat:*)", "shell(mkdir:*)", "shell(sleep:*)", "shell(true)", "shell(printf:*)",
            "file(read:${WORKSPACE}/**)", "file(write:${WORKSPACE}/**)",
        ],
        "deny": ["shell(curl:*)"],
    }
}  # fmt: skip
PAUSED = TERMINAL | {TaskState.TASK_STATE_INPUT_REQUIRED}


def said(text: str | Part, *, context: str | None = None, task: str | None = None) -> Message:
    """A message of a caller."""
    part = text if isinstance(text, Part) else Part(text=text)
    return Message(role=Role.ROLE_USER, message_id=uuid.uuid4().hex, context_id=context, task_id=task, parts=[part])


def state(task: Task) -> str:
    """The state of a task, in short."""
    return TaskState.Name(task.status.state).removeprefix("TASK_STATE_").lower()


def answer(task: Task) -> str:
    """What a task has to say."""
    return "".join(part.text for each in task.artifacts if each.artifact_id == "answer" for part in each.parts)


def words(task: Task) -> str:
    """The words of a task's status."""
    return "\n".join(part.text for part in task.status.message.parts if part.HasField("text"))


def files(task: Task) -> dict[str, bytes | str]:
    """The files a task gave: their bytes, or where they are."""
    found: dict[str, bytes | str] = {}
    for each in task.artifacts:
        if each.artifact_id.startswith("file-"):
            part = each.parts[0]
            found[each.name] = part.raw if part.HasField("raw") else part.url or part.text
    return found


async def until(condition: Callable[[], Awaitable[Any]], seconds: float = 30) -> Any:
    """Wait for something to become true."""
    async with asyncio.timeout(seconds):
        while True:
            if found := await condition():
                return found
            await asyncio.sleep(0.02)


class A2aCaller:
    """The official client, and what tests say with it."""

    def __init__(self, client: Client):
        self.client = client

    async def events(self, message: Message, **configuration: Any) -> list[StreamResponse]:
        """All that comes back for a message."""
        request = SendMessageRequest(message=message, configuration=SendMessageConfiguration(**configuration))
        return [event async for event in self.client.send_message(request)]

    async def send(self, text: str | Part, **where: Any) -> Task:
        """The task that a message led to, once it pauses."""
        events = await self.events(said(text, **where))
        return events[-1].task if events[-1].HasField("task") else await self.get(_task_of(events[-1]))

    async def start(self, text: str, **where: Any) -> Task:
        """The task that a message led to, at once."""
        [event] = await self.events(said(text, **where), return_immediately=True)
        return event.task

    async def get(self, task_id: str) -> Task:
        """A task as it is now."""
        return await self.client.get_task(GetTaskRequest(id=task_id))

    async def cancel(self, task_id: str) -> Task:
        """Cancel a task."""
        return await self.client.cancel_task(CancelTaskRequest(id=task_id))

    async def pause(self, task_id: str, *, states: frozenset[Any] | set[Any] = PAUSED, seconds: float = 30) -> Task:
        """A task once it has ended or waits."""

        async def look() -> Task | None:
            task = await self.get(task_id)
            return task if task.status.state in states else None

        found: Task = await until(look, seconds)
        return found


def _task_of(event: StreamResponse) -> str:
    kind = event.WhichOneof("payload")
    found = getattr(event, str(kind))
    return str(found.id if kind == "task" else found.task_id)


@asynccontextmanager
async def caller(
    url: str, token: str | None, *, streaming: bool = False, binding: str = TransportProtocol.JSONRPC
) -> AsyncIterator[A2aCaller]:
    """The official client of an agent."""
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(headers=headers, timeout=60, trust_env=False) as http:
        config = ClientConfig(httpx_client=http, streaming=streaming, supported_protocol_bindings=[binding])
        client = await ClientFactory(config).create_from_url(url)
        yield A2aCaller(client)


@dataclass
class Ground:
    """A server, tokens of an agent and of a person, and a context with a policy for one test."""

    url: str
    context: str
    token: str
    person: AsyncClient
    owner: AsyncClient
    person_token: str
    directory: Path
    models: dict[str, Any] = field(default_factory=dict)

    def settings(self, **more: Any) -> AgentSettings:
        """An agent of this test."""
        given = {"carrel_url": self.url, "database": str(self.directory / "agent.db"), "port": 0, **more}
        return AgentSettings(**given)

    @asynccontextmanager
    async def agent(self, **more: Any) -> AsyncIterator[RunningAgent]:
        """An agent in this process."""
        settings = self.settings(**more)
        async with running(settings, self._model(settings)) as agent:
            yield agent

    def _model(self, settings: AgentSettings) -> Any:
        """The model of an endpoint: LangChain keeps its connections for later agents, so they are closed in the end."""
        if settings.base_url is None:
            return None
        if settings.base_url not in self.models:
            self.models[settings.base_url] = resolve_model(settings.model, base_url=settings.base_url)
        return self.models[settings.base_url]

    async def close(self) -> None:
        """Close the connections to models."""
        for model in self.models.values():
            await model.root_async_client.close()

    @asynccontextmanager
    async def talk(self, *, streaming: bool = False, token: str | None = None, **more: Any) -> AsyncIterator[A2aCaller]:
        """A caller of an agent of its own."""
        async with self.agent(**more) as agent, caller(agent.url, token or self.token, streaming=streaming) as found:
            yield found

    async def programs(self, name: str) -> int:
        """How many programs of a name run in the sandbox of this test."""
        box = await self.owner.sandbox(self.context)
        found = await box.commands.run("cat /proc/[0-9]*/comm 2>/dev/null")
        return found.stdout.split().count(name)

    async def pending(self) -> str:
        """The approval that waits in this context."""

        async def look() -> str | None:
            async for info in self.owner.approvals.list(state="pending", context_id=self.context):
                return info.id
            return None

        return str(await until(look))


class Process:
    """An agent in a process of its own, that can be killed. It is forked where the fixture `agents_fork` is used."""

    def __init__(self, ground: Ground, *arguments: str, stderr: IO[bytes] | None = None):
        environment = {key: value for key, value in os.environ.items() if not key.startswith("CARREL_")}
        words = ["agent", "--port", "0", "--database", str(ground.directory / "agent.db"), *arguments]
        read, write = os.pipe()
        self._said = os.fdopen(read)
        with os.fdopen(write, "wb") as stdout:
            self._process = start(
                [sys.executable, "-m", "carrel", *words],
                program=AGENT,
                env={**environment, "CARREL_URL": ground.url},
                stdout=stdout,
                stderr=stderr or sys.__stderr__,
            )
        line = self._said.readline()
        if "listens on" not in line:
            self.kill()
            raise AssertionError(f"the agent did not start: {line}")
        self.url = line.split()[-1]

    def kill(self) -> None:
        """End it, with no time for anything."""
        self._process.kill()
        self._end()

    def stop(self) -> int:
        """Ask it to end."""
        self._process.send_signal(signal.SIGTERM)
        return self._end()

    def _end(self) -> int:
        if not self._said.closed:
            with self._said as rest:
                rest.read()
        return self._process.wait(30)
