"""A task of the A2A agent that runs `true`, through the official client, compared with the same command through the
SDK.

The agent is `carrel agent --model shell` in a separate process, with its tasks and checkpoints in SQLite.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from a2a.client import Client, ClientConfig, ClientFactory
from a2a.types.a2a_pb2 import Message, Part, Role, SendMessageRequest, StreamResponse, TaskState

from bench import ground
from bench.measure import BenchFailed, Progress, Report, Table, median, percentile, ratio, rounds, timed_async
from carrel.client import AsyncClient

ROUNDS = 150
CONTEXT = "bench-a2a"


async def run(progress: Progress) -> Report:
    """Measure."""
    async with ground.server() as server, AsyncClient(server.url, server.token) as carrel, _agent(server) as url:
        headers = {"authorization": f"Bearer {server.token}"}
        async with httpx.AsyncClient(headers=headers, timeout=60, trust_env=False) as http:
            caller = await ClientFactory(ClientConfig(httpx_client=http, streaming=False)).create_from_url(url)
            box = await carrel.sandbox(CONTEXT)
            contenders = {
                "SDK": timed_async(lambda: box.commands.run("true"), lambda result: result.exit_code == 0),
                "A2A": timed_async(
                    lambda: _task(caller),
                    lambda answer: answer.task.status.state == TaskState.TASK_STATE_COMPLETED,
                ),
            }
            samples = await rounds(contenders, ROUNDS, warm_up=10, progress=progress)
    table = Table(f"`true` in a running context, {ROUNDS} rounds", ("", "median ms", "p99 ms", "× SDK"))
    for name, taken in samples.items():
        table.add(name, median(taken) * 1e3, percentile(taken, 99) * 1e3, ratio(taken, samples["SDK"]))
    figures = {
        "a2a_roundtrip_ms": median(samples["A2A"]) * 1e3,
        "a2a_roundtrip_p99_ms": percentile(samples["A2A"], 99) * 1e3,
        "a2a_roundtrip_sdk_ms": median(samples["SDK"]) * 1e3,
    }
    return Report({**figures}, [table])


@asynccontextmanager
async def _agent(server: ground.Server) -> AsyncIterator[str]:
    """Run the agent in a separate process."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CARREL_")}
    command = [sys.executable, "-m", "carrel", "agent", "--port", "0", "--log-level", "error"]
    process = subprocess.Popen(
        [*command, "--database", str(server.data.parent / "agent.db")],
        env={**environment, "CARREL_URL": server.url},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        if "listens on" not in line:
            raise BenchFailed(f"the agent did not start: {line}")
        yield line.split()[-1]
    finally:
        process.terminate()
        ground.wait_or_kill(process, 30)
        process.stdout.close()


async def _task(caller: Client) -> StreamResponse:
    """Run a task with `true` to its end."""
    part = Part(text="true")
    message = Message(role=Role.ROLE_USER, message_id=uuid.uuid4().hex, context_id=CONTEXT, parts=[part])
    [answer] = [each async for each in caller.send_message(SendMessageRequest(message=message))]
    return answer
