"""The tool that runs Python, in a new process or in a code context that keeps variables and returns figures."""

from __future__ import annotations

import hashlib
from typing import Any

import anyio
from pydantic import Field

from carrel.client import AsyncCodeContext, AsyncSandbox
from carrel.integrations.mcp.answers import Image, ToolAnswer
from carrel.integrations.mcp.calls import Parameters, Tool, ToolCall
from carrel.integrations.mcp.command_tools import TIDY_S, run_and_follow
from carrel.integrations.mcp.output import HEAD, TAIL, Capture
from carrel.integrations.tool_results import cut_middle, joined
from carrel.models import MAX_PYTHON_TIMEOUT_S, CellResult, CodeContextName
from carrel.models.base import MAX_CODE
from carrel.models.environments import EnvironmentName
from carrel.models.python import PYTHON_TIMEOUT_S

CELL = "cell/"
IMAGES = ("image/png", "image/jpeg")
MOST_IMAGE = 700_000
"""Characters of base64 in one answer: clients refuse messages larger than a megabyte."""


class RunPython(Parameters):
    """Parameters of `python`."""

    code: str = Field(min_length=1, max_length=MAX_CODE, description="Python code. Print what you want to see.")
    code_context: CodeContextName | None = Field(
        default=None,
        description="A name of your choice, such as main: variables are kept for the next call with the same name, "
        "the value of the last expression is shown, and so are figures of matplotlib. Without it each call is a "
        "fresh process.",
    )
    env: EnvironmentName | None = Field(
        default=None,
        description="An environment that attach_environment answered. For a code context it counts when that starts.",
    )
    timeout: float | None = Field(
        default=None, gt=0, le=MAX_PYTHON_TIMEOUT_S, description="Seconds; 30 when not given, 120 at most."
    )


async def _python(call: ToolCall, given: RunPython) -> ToolAnswer:
    if given.code_context is not None:
        return await _cell(call, given, given.code_context)

    return await run_and_follow(call, lambda box: box.python.stream(given.code, env=given.env, timeout=given.timeout))


async def _cell(call: ToolCall, given: RunPython, name: str) -> ToolAnswer:
    seen = Capture()

    async def run(box: AsyncSandbox) -> CellResult:
        context = box.python.context(name, env=given.env)
        try:
            stream = context.stream(given.code, timeout=given.timeout or PYTHON_TIMEOUT_S)
            async with stream:
                async for chunk in stream:
                    seen.add(chunk)
                return await stream.result()
        except anyio.get_cancelled_exc_class():
            await _interrupt(context)
            raise

    async with call.reporting(lambda: f"{call.elapsed:.0f} s, {seen.total} bytes: {seen.last_line}"):
        result = await call.do(run)
    return shown_cell(result)


async def _interrupt(context: AsyncCodeContext) -> None:
    with anyio.CancelScope(shield=True), anyio.move_on_after(TIDY_S):
        await context.interrupt()


def shown_cell(result: CellResult) -> ToolAnswer:
    """Return the answer for a cell, with its images."""
    text = cell_text(result)
    handle = cell_handle(result, text)
    marker = f'[the middle is left out here: read_output with handle "{handle}" has all of it]'
    output = cut_middle(text, marker, head=HEAD, tail=TAIL)
    images, too_large = _images(result)
    lines = [_ending(result), *too_large]
    if result.fresh and result.number <= 1:
        lines.append(f"[the code context {result.context} has just started: it has no variables from before]")
    return ToolAnswer(joined(output, "\n".join(lines)), images=images)


def cell_handle(result: CellResult, text: str) -> str:
    """Return the handle of a cell for later calls. It has a hash of the text: a restarted context reuses ids."""
    return f"{CELL}{result.context}/{result.id}/{hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:12]}"


def cell_text(result: CellResult) -> str:
    """Return all text output of a cell."""
    parts = [result.stdout, result.stderr]
    parts += [each.text or "" for each in result.results if each.kind != "figure"]
    if result.error is not None:
        parts.append(result.error.traceback or f"{result.error.name}: {result.error.value}")
    return "".join(part if part.endswith("\n") else part + "\n" for part in parts if part)


def _ending(result: CellResult) -> str:
    if result.timed_out:
        how = "interrupted at its deadline"
    elif result.oom_killed:
        how = "out of memory: the code context ended, its variables are gone"
    elif result.status == "died":
        how = "the code context ended with it, its variables are gone"
    else:
        how = {"ok": "ok", "error": "it raised an exception", "interrupted": "interrupted"}[result.status]
    dropped = f"; {result.dropped_bytes} bytes of output beyond the limit were not kept" if result.truncated else ""
    return f"[{how}, {result.duration_ms / 1000:.1f} s{dropped}]"


def _images(result: CellResult) -> tuple[list[Image], list[str]]:
    images: list[Image] = []
    too_large: list[str] = []
    room = MOST_IMAGE
    for each in result.results:
        found = next(((kind, each.data[kind]) for kind in IMAGES if kind in each.data), None)
        if found is None:
            continue
        kind, data = found
        data = data.replace("\n", "")
        if len(data) > room:
            too_large.append(
                f"[an {kind} of {len(data) * 3 // 4} bytes is too large to be shown: draw it smaller, or save it]"
            )
            continue
        room -= len(data)
        images.append(Image(data, kind))
    return images, too_large


TOOLS: list[Tool[Any]] = [
    Tool(
        name="python",
        title="Run Python",
        description=(
            "Run Python code in the workspace's sandbox. Without code_context each call is a fresh process in the "
            "workspace, like a script. With code_context it works like a notebook: variables stay, the last "
            "expression's value is shown, figures of matplotlib come back as images. An exception is a result. For "
            "packages that are not there call attach_environment first and pass what it answers as env. For long "
            "work (more than 120 s) write a script and use run_command."
        ),
        parameters=RunPython,
        run=_python,
        destructive=True,
        open_world=True,
    ),
]
