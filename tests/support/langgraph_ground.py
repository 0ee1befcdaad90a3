"""What tests of LangGraph stand on: an OpenAI-compatible server that follows a script, and agents in processes of their
own that can be killed at any point of their work.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tests.support.fork_server import start

from carrel.client import AsyncClient
from carrel.integrations.langgraph import Workspace, build_graph, resolve_model

Message = dict[str, Any]
Step = Message | Callable[[list[Message]], Message]

POLICY = {
    "permissions": {
        "allow": [
            "shell(echo:*)", "shell(cat:*)", "shell(printf:*)", "shell(sleep:*)", "shell(true)", "shell(test:*)",
            "shell([:*)", "shell(grep:*)", "file(read:${WORKSPACE}/**)", "file(write:${WORKSPACE}/**)",
        ],
        "deny": ["shell(curl:*)"],
    }
}  # fmt: skip


def says(text: str) -> Message:
    """An answer of the model."""
    return {"role": "assistant", "content": text}


def calls(*wanted: tuple[str, dict[str, Any]]) -> Message:
    """Tool calls of the model."""
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for index, (name, arguments) in enumerate(wanted)
        ],
    }


def runs(*commands: str) -> Message:
    """Commands that the model wants."""
    return calls(*(("run_command", {"command": command}) for command in commands))


def last_results(messages: list[Message], count: int = 1) -> list[str]:
    """What the last tools told the model."""
    return [str(message["content"]) for message in messages if message["role"] == "tool"][-count:]


class Scripted:
    """The server. The script is a list of steps; which one is next is what the conversation says, and nothing else."""

    def __init__(self, script: list[Step]):
        self.script = script
        self.requests: list[Message] = []
        self.url = ""

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        done = sum(message["role"] == "assistant" for message in body["messages"])
        if done >= len(self.script):
            return JSONResponse({"error": {"message": "the script is over", "code": "over"}}, 400)
        step = self.script[done]
        message = step(body["messages"]) if callable(step) else step
        if body.get("stream"):
            return StreamingResponse(_chunks(body, message), media_type="text/event-stream")
        return JSONResponse(
            {
                "id": f"chatcmpl-{done}",
                "object": "chat.completion",
                "created": 1,
                "model": body["model"],
                "choices": [
                    {
                        "index": 0,
                        "message": message,
                        "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
                    }
                ],
                "usage": {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18},
            }
        )


def _chunks(body: Message, message: Message) -> Iterator[str]:
    """A text, letter by letter; how many tokens it took is told to who asks for that."""
    deltas: list[Message] = [{"delta": {"content": letter}} for letter in message["content"]]
    deltas.append({"delta": {}, "finish_reason": "stop"})
    chunks: list[Message] = [{"choices": [{"index": 0, **each}]} for each in deltas]
    if (body.get("stream_options") or {}).get("include_usage"):
        usage = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
        chunks.append({"choices": [], "usage": usage})
    for chunk in chunks:
        whole = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": body["model"], **chunk}
        yield f"data: {json.dumps(whole)}\n\n"
    yield "data: [DONE]\n\n"


@asynccontextmanager
async def scripted(*script: Step) -> AsyncIterator[Scripted]:
    """A scripted server on loopback."""
    model = Scripted(list(script))
    app = Starlette(routes=[Route("/v1/chat/completions", model.answer, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    [listener] = server.servers
    model.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1"
    try:
        yield model
    finally:
        server.should_exit = True
        await serving


@asynccontextmanager
async def graph_of(model: Scripted, **more: Any) -> AsyncIterator[Any]:
    """A graph that asks a scripted server."""
    chat: Any = resolve_model("scripted", base_url=model.url, metrics=more.pop("metrics", None))
    try:
        yield build_graph(chat, **more)
    finally:
        await chat.root_async_client.close()


class Nursery:
    """A process that has everything imported and forks an agent for each job."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.agent_process"],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _lines(self) -> Iterator[Message]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            yield json.loads(line)

    def begin(self, **job: object) -> int:
        """Start an agent; its process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return int(next(self._lines())["pid"])

    def end(self) -> Message:
        """What an agent came to: `status` of its process, and what it said if it came so far."""
        said: Message = {}
        for line in self._lines():
            if "status" in line:
                return {**said, **line}
            said = line
        raise AssertionError("the nursery has ended")

    async def run(self, **job: object) -> Message:
        """An agent from its start to its end."""
        self.begin(**job)
        return await asyncio.to_thread(self.end)

    def close(self) -> None:
        """No more agents."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


class Served:
    """A real server in a process of its own, forked where a fork server runs."""

    def __init__(self, directory: Path, port: int = 0):
        command = [sys.executable, "-m", "carrel", "serve", "--port", str(port), "--data-dir", str(directory)]
        self.folders = directory.parent / "folders"
        self.folders.mkdir(exist_ok=True)
        command += ["--set", f"sandbox.folder_roots={self.folders}"]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("CARREL_")}
        (directory / "server.json").unlink(missing_ok=True)
        with (directory.parent / "server.log").open("ab") as log:
            self.process = start(command, env=environment, stdout=log, stderr=log)
        deadline = time.monotonic() + 90
        while not (directory / "server.json").exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise AssertionError("the server did not start:\n" + (directory.parent / "server.log").read_text())
            time.sleep(0.02)
        self.url: str = json.loads((directory / "server.json").read_bytes())["url"]
        self.token = (directory / "token").read_text().strip()

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End it as it should."""
        self.process.terminate()
        try:
            self.process.wait(30)
        finally:
            self.kill()


@dataclass
class Ground:
    """A context with a policy, an agent that works in it, and a person who may decide."""

    url: str
    context: str
    token: str
    owner: AsyncClient
    agent: AsyncClient
    person: AsyncClient

    @property
    def workspace(self) -> Workspace:
        """What a run of the agent uses."""
        return Workspace(self.agent)

    async def ran(self, command: str) -> int:
        """How often a command was started, by the audit log."""
        records = self.owner.audit.search(context_id=self.context, name="start_command", result="ok")
        return sum([command in json.dumps(record.arguments) async for record in records])


async def lines_of(client: AsyncClient, context: str, path: str) -> list[str]:
    """The lines of a file of a context's workspace; none when it is not there."""
    box = client.attach(await client.find(context))
    if not await box.files.exists(path):
        return []
    return (await box.files.read_text(path)).splitlines()


async def until(found: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Wait for a condition."""
    async with asyncio.timeout(seconds):
        while not (value := await found()):
            await asyncio.sleep(0.02)
    return value
