"""The tool that reads more output: the rest of a long answer, or of a command that still runs."""

from __future__ import annotations

from typing import Any

import anyio
from pydantic import Field

from carrel.client import AsyncSandbox
from carrel.errors import InvalidRequest, NotFound
from carrel.integrations.mcp.answers import ToolAnswer
from carrel.integrations.mcp.calls import Tool, ToolCall
from carrel.integrations.mcp.command_tools import OUTPUT, ending_of, facts, opened
from carrel.integrations.mcp.output import LIMIT, Reading
from carrel.integrations.mcp.python_tools import CELL, cell_handle, cell_text
from carrel.integrations.tool_results import joined
from carrel.models import CommandInfo
from carrel.models.base import Request


class ReadOutput(Request):
    """Parameters of `read_output`."""

    handle: str = Field(min_length=1, max_length=256, description="The handle that an answer named.")
    offset: int = Field(default=0, ge=0, le=10**15, description="Where to go on: next_offset of the answer before.")
    wait: float = Field(
        default=0.0, ge=0, le=300, description="Wait up to so many seconds for a command that runs to end."
    )


async def _read(call: ToolCall, given: ReadOutput) -> ToolAnswer:
    if given.handle.startswith(CELL):
        return await _read_cell(call, given)

    async def read(box: AsyncSandbox) -> tuple[Reading, CommandInfo]:
        command, _ = await opened(box, given.handle)
        reading = Reading(given.offset)
        with anyio.move_on_after(given.wait or None):
            async with command.stream(given.offset) if given.wait else command.written(given.offset) as stream:
                async for chunk in stream:
                    if not reading.add(chunk):
                        break
        return reading, await command.info()

    reading, info = await call.access.do(read)
    more = reading.more or reading.offset < info.output_bytes
    if more:
        ending = f"[there is more: read_output with offset {reading.offset}]"
    elif info.running:
        ending = f"[that is all so far, and it still runs: read_output with offset {reading.offset} goes on]"
    else:
        ending = ending_of(info)
    left_out = max(0, info.output_bytes - reading.offset)
    value = {"output": reading.text, "handle": given.handle, **facts(info)}
    value |= {"next_offset": reading.offset, "left_out_bytes": left_out}
    return ToolAnswer(joined(reading.text, ending), value)


async def _read_cell(call: ToolCall, given: ReadOutput) -> ToolAnswer:
    parts = given.handle.removeprefix(CELL).split("/")
    if len(parts) != 3 or not all(parts):
        raise InvalidRequest("this is not a handle", field="handle", hint="use the handle from an earlier answer")

    result = await call.access.do(lambda box: box.python.context(parts[0]).cell(parts[1]))
    text = cell_text(result)
    if cell_handle(result, text) != given.handle:
        raise NotFound(
            "the code context was restarted since, so the cell and its output are gone",
            field="handle",
            hint="run it again",
        )
    part = text[given.offset : given.offset + LIMIT]
    after = given.offset + len(part)
    left_out = len(text) - after if after < len(text) else 0
    ending = f"[there is more: read_output with offset {after}]" if left_out else "[that is all]"
    value = {"output": part, "handle": given.handle, "running": False, "next_offset": after, "left_out_bytes": left_out}
    return ToolAnswer(joined(part, ending), value)


TOOLS: list[Tool[Any]] = [
    Tool(
        name="read_output",
        title="Read on",
        description=(
            "Read what a command or a Python cell wrote, from an offset on: the rest of an answer that was too long, "
            "or what a command in the background has written so far. With wait it waits for the command to end."
        ),
        parameters=ReadOutput,
        run=_read,
        read_only=True,
        output=OUTPUT,
    ),
]
