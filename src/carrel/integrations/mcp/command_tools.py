"""The tools that run and stop commands, and the answers about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
from pydantic import Field

from carrel.client import AsyncCommand, AsyncOutputStream, AsyncSandbox
from carrel.errors import InvalidRequest, NotFound
from carrel.integrations.mcp.answers import ToolAnswer
from carrel.integrations.mcp.calls import Parameters, Tool, ToolCall
from carrel.integrations.mcp.output import Capture
from carrel.integrations.tool_results import ending, joined
from carrel.models import CommandInfo
from carrel.models.base import MAX_PATH, MAX_TIMEOUT_S, CommandText, EnvName, NoNul, Request

TIDY_S = 10.0

OUTPUT = {
    "output": {"type": "string", "description": "stdout and stderr in the order they were written"},
    "handle": {"type": "string", "description": "names the command for read_output and stop_command"},
    "running": {"type": "boolean"},
    "exit_code": {
        "anyOf": [{"type": "integer"}, {"type": "null"}],
        "description": "null while it runs, or when a signal ended it",
    },
    "signal": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "timed_out": {"type": "boolean"},
    "out_of_memory": {"type": "boolean"},
    "duration_ms": {"type": "number"},
    "left_out_bytes": {"type": "integer", "description": "bytes of output that are not in `output`"},
    "next_offset": {"type": "integer", "description": "where read_output goes on with what is not in `output`"},
    "dropped_bytes": {"type": "integer", "description": "output beyond the limit that was not kept"},
}


class RunCommand(Parameters):
    """Parameters of `run_command`."""

    command: CommandText = Field(description="Shell text, run with /bin/sh -c in the workspace.")
    cwd: NoNul | None = Field(
        default=None, max_length=MAX_PATH, description="Directory to run in, relative to the workspace."
    )
    env: dict[EnvName, NoNul] = Field(
        default_factory=dict, max_length=256, description="More environment variables, name to value."
    )
    stdin: str | None = Field(
        default=None, max_length=1_048_576, description="Text for standard input, which is closed after it."
    )
    timeout: float | None = Field(
        default=None,
        ge=0,
        le=MAX_TIMEOUT_S,
        description="Seconds after which everything it started is killed; 0 means never. Without it: 300 seconds "
        "unless the server says otherwise, and no deadline in the background.",
    )
    background: bool = Field(
        default=False,
        description="Answer at once with a handle and leave it running, for servers and long jobs.",
    )


class StopCommand(Request):
    """Parameters of `stop_command`."""

    handle: str = Field(min_length=1, max_length=256, description="The handle that run_command answered.")


async def _run(call: ToolCall, given: RunCommand) -> ToolAnswer:
    more: Any = {"cwd": given.cwd, "env": given.env or None, "stdin": given.stdin}
    if given.timeout is not None:
        more["timeout"] = given.timeout

    if given.background:
        command = await call.do(lambda box: box.commands.start(given.command, **more))
        handle = handle_of(await command.info())
        note = (
            f"Started in the background. Its handle is {handle}: read_output reads what it wrote, stop_command ends it."
        )
        return ToolAnswer(note, {"handle": handle, "running": True, "output": "", "next_offset": 0})
    return await run_and_follow(call, lambda box: box.commands.stream(given.command, **more))


async def run_and_follow(call: ToolCall, begin: Callable[[AsyncSandbox], AsyncOutputStream]) -> ToolAnswer:
    """Start a command and follow its output to the end. Cancelling the call kills the command and its children."""
    capture = Capture()

    async def start(box: AsyncSandbox) -> tuple[AsyncCommand, AsyncOutputStream]:
        stream = begin(box)
        id = await stream.open()
        assert id is not None
        return box.commands.get(id), stream

    await call.access.sandbox()
    # A cancellation during the start takes effect when the id is known, so that the command can be killed.
    with anyio.CancelScope(shield=True):
        command, stream = await call.do(start)

    def words() -> str:
        last = f": {capture.last_line}" if capture.last_line else ""
        return f"{call.elapsed:.0f} s, {capture.total} bytes{last}"

    try:
        async with stream, call.reporting(words):
            await anyio.lowlevel.checkpoint()
            async for chunk in stream:
                capture.add(chunk)
        info = stream.info or await command.info()
    except anyio.get_cancelled_exc_class():
        with anyio.CancelScope(shield=True), anyio.move_on_after(TIDY_S):
            await command.kill()
        raise
    return _ended(capture, info)


def handle_of(info: CommandInfo) -> str:
    """Return the handle of a command for later calls. It has the start time, because a restarted sandbox reuses ids."""
    return f"{info.id}.{int(info.started_at.timestamp() * 1000):x}"


async def opened(box: AsyncSandbox, handle: str) -> tuple[AsyncCommand, CommandInfo]:
    """Return the command of a handle. Raises `NotFound`."""
    id, dot, _ = handle.partition(".")
    if not id or not dot:
        raise InvalidRequest("this is not a handle", field="handle", hint="use the handle from an earlier answer")
    command = box.commands.get(id)
    info = await command.info()
    if handle_of(info) != handle:
        raise NotFound(
            "the sandbox was restarted since, so the command and its output are gone",
            field="handle",
            hint="run it again",
        )
    return command, info


def _ended(capture: Capture, info: CommandInfo) -> ToolAnswer:
    """Return the answer for a command that has ended."""
    handle, left_out = handle_of(info), capture.left_out
    marker = (
        f'[{left_out} bytes are left out here: read_output with handle "{handle}" and offset {capture.resume} has them]'
    )
    output = capture.text(marker)
    value: dict[str, object] = {"output": output, "handle": handle, **facts(info)}
    value |= {"left_out_bytes": left_out, "next_offset": capture.resume if left_out else capture.offset}
    return ToolAnswer(joined(output, ending_of(info)), value)


def facts(info: CommandInfo) -> dict[str, object]:
    """Return the state of a command, for programs."""
    return {
        "running": info.running,
        "exit_code": info.exit_code,
        "signal": info.signal,
        "timed_out": info.timed_out,
        "out_of_memory": info.oom_killed,
        "duration_ms": info.duration_ms,
        "dropped_bytes": info.dropped_bytes,
    }


def ending_of(info: CommandInfo) -> str:
    """Say in one line how a command ended."""
    if info.running:
        return "[it still runs]"
    dropped = f"; {info.dropped_bytes} bytes of output beyond the limit were not kept" if info.dropped_bytes else ""
    return f"[{ending(info)}, {info.duration_ms / 1000:.1f} s{dropped}]"


async def _stop(call: ToolCall, given: StopCommand) -> ToolAnswer:
    async def stop(box: AsyncSandbox) -> CommandInfo:
        command, _ = await opened(box, given.handle)
        await command.kill()
        await command.wait()
        return await command.info()

    info = await call.access.do(stop)
    return ToolAnswer(
        f"It has ended, with everything it started; read_output still reads what it wrote. {ending_of(info)}",
        {"handle": given.handle, **facts(info)},
    )


TOOLS: list[Tool[Any]] = [
    Tool(
        name="run_command",
        title="Run a command",
        description=(
            "Run shell text in the workspace: a private Linux machine whose files are kept between calls. "
            "Answers with what it wrote (stdout and stderr in order) and its exit code; a non-zero exit code is a "
            "result, not a failure of the tool. Each call is a new shell: use cwd or `cd dir && …`. Programs started "
            "with `&` go on until the sandbox ends. For servers and jobs of more than a few minutes use background. "
            "Very long output is shortened in the middle; read_output has the rest. A policy decides each command: "
            "what it denies is told with the rule, what needs a person with an approval."
        ),
        parameters=RunCommand,
        run=_run,
        destructive=True,
        open_world=True,
        output=OUTPUT,
    ),
    Tool(
        name="stop_command",
        title="Stop a command",
        description="Kill a command that runs in the background, with every process it started.",
        parameters=StopCommand,
        run=_stop,
        destructive=True,
        idempotent=True,
        output=OUTPUT,
    ),
]
