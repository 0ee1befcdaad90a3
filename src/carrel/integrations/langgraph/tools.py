"""carrel's operations as LangChain tools: commands, Python and files of the run's workspace.

Decides how much of a result the model sees. The server decides what is allowed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated

from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool, StructuredTool
from pydantic import Field

from carrel.client import AsyncCommand, AsyncSandbox
from carrel.errors import Conflict, NotFound, NotRunning
from carrel.integrations.langgraph.operation import Attempt, Runtime, ToolReply, perform
from carrel.integrations.langgraph.workspace import Workspace
from carrel.integrations.text import printable
from carrel.integrations.tool_results import cut_middle, ending
from carrel.models import MAX_TIMEOUT_S, CommandResult, FileInfo, FileKind
from carrel.models.base import MAX_PATH

MOST_CHARACTERS = 30_000
"""The model sees this much of one text; the middle of a longer one is left out."""
MOST_OUTPUT = 1024 * 1024
MOST_READ = 4 * 1024 * 1024
MOST_LINES = 2000
MOST_ENTRIES = 500
MOST_MATCHES = 200

Path = Annotated[str, Field(description="a path in the workspace", min_length=1, max_length=MAX_PATH)]


def carrel_tools(workspace: Workspace | None = None) -> list[BaseTool]:
    """Return the tools, for the workspace of the run (`context=Workspace(…)`), or else for this one."""

    async def run_command(
        runtime: Runtime,
        command: Annotated[str, Field(description="a text for /bin/sh", min_length=1)],
        cwd: Annotated[str | None, Field(description="directory in the workspace")] = None,
        timeout: Annotated[float | None, Field(description="seconds; 0: none", ge=0, le=MAX_TIMEOUT_S)] = None,
    ) -> ToolMessage:
        """Run a shell command in the workspace and wait for it. Returns its output and exit code."""

        async def act(attempt: Attempt, box: AsyncSandbox) -> ToolReply:
            async def start() -> AsyncCommand:
                return await box.commands.start(
                    command,
                    cwd=cwd,
                    timeout="default" if timeout is None else timeout,
                    output_limit=MOST_OUTPUT,
                    id=attempt.id,
                )

            return await start_and_wait(attempt, box, start)

        asked = {"command": command, "cwd": cwd, "timeout": timeout}
        return await perform(runtime, workspace, "run_command", asked, command, act)

    async def python(
        runtime: Runtime,
        code: Annotated[str, Field(description="Python source; print what you want to see", min_length=1)],
        requirements: Annotated[list[str] | None, Field(description="packages it needs, such as pandas")] = None,
        timeout: Annotated[float | None, Field(description="seconds, 120 at most", gt=0, le=120)] = None,
    ) -> ToolMessage:
        """Run Python code in a fresh process in the workspace and wait for it."""

        async def act(attempt: Attempt, box: AsyncSandbox) -> ToolReply:
            async def start() -> AsyncCommand:
                return await box.python.start(code, requirements=requirements or None, timeout=timeout, id=attempt.id)

            return await start_and_wait(attempt, box, start)

        asked = {"code": code, "requirements": requirements, "timeout": timeout}
        return await perform(runtime, workspace, "python", asked, f"python: {code}", act)

    async def read_file(
        runtime: Runtime,
        path: Path,
        first_line: Annotated[int, Field(description="from 1", ge=1)] = 1,
        lines: Annotated[int, Field(description="how many at most", ge=1, le=MOST_LINES)] = MOST_LINES,
    ) -> ToolMessage:
        """Read a text file of the workspace, whole or some lines of it."""

        async def act(_attempt: Attempt, box: AsyncSandbox) -> ToolReply:
            data = await box.files.read(path, length=MOST_READ + 1)
            return _lines_of(path, data, first_line, lines)

        asked = {"path": path, "first_line": first_line, "lines": lines}
        return await perform(runtime, workspace, "read_file", asked, f"read {path}", act)

    async def write_file(
        runtime: Runtime, path: Path, content: Annotated[str, Field(description="all of the new text")]
    ) -> ToolMessage:
        """Create a file in the workspace, or replace it. Missing directories are created."""

        async def act(_attempt: Attempt, box: AsyncSandbox) -> ToolReply:
            info = await box.files.write(path, content)
            return ToolReply(text=f"wrote {info.path}, {info.size} bytes", artifact=_entry(info), error=False)

        asked = {"path": path, "content": content}
        return await perform(runtime, workspace, "write_file", asked, f"write {path}", act)

    async def edit_file(
        runtime: Runtime,
        path: Path,
        old: Annotated[str, Field(description="the text to replace, exactly and only once in the file", min_length=1)],
        new: Annotated[str, Field(description="the text to put in its place")],
        replace_all: Annotated[bool, Field(description="replace every occurrence")] = False,
    ) -> ToolMessage:
        """Replace a text in a file of the workspace."""

        async def act(attempt: Attempt, box: AsyncSandbox) -> ToolReply:
            result = await box.files.edit(path, old, new, replace_all=replace_all, id=attempt.id)
            text = f"replaced {result.replaced} in {result.file.path}, {result.file.size} bytes now"
            return ToolReply(text=text, artifact={"replaced": result.replaced, **_entry(result.file)}, error=False)

        asked = {"path": path, "old": old, "new": new, "replace_all": replace_all}
        return await perform(runtime, workspace, "edit_file", asked, f"edit {path}", act)

    async def list_files(
        runtime: Runtime,
        path: Path = ".",
        recursive: Annotated[bool, Field(description="also list subdirectories")] = False,
    ) -> ToolMessage:
        """List a directory of the workspace."""

        async def act(_attempt: Attempt, box: AsyncSandbox) -> ToolReply:
            found = await box.files.list(path, recursive=recursive, limit=MOST_ENTRIES)
            shown = [_described(info) for info in found]
            if found.truncated:
                shown.append(f"[only the first {MOST_ENTRIES}; list a directory below]")
            artifact: dict[str, object] = {"entries": len(found), "truncated": found.truncated}
            return ToolReply(text=shorten("\n".join(shown)) or "(empty)", artifact=artifact, error=False)

        asked = {"path": path, "recursive": recursive}
        return await perform(runtime, workspace, "list_files", asked, f"list {path}", act)

    async def search_files(
        runtime: Runtime,
        pattern: Annotated[str, Field(description="an extended regular expression, as of grep -E", min_length=1)],
        path: Path = ".",
        names: Annotated[str | None, Field(description="only files of such names, for example *.py")] = None,
    ) -> ToolMessage:
        """Search the text files of the workspace with grep. Returns path, line number and line of each match."""
        only = [] if names is None else [f"--include={names}"]
        words = ["grep", "-rnIsE", f"--max-count={MOST_MATCHES}", *only, "-e", pattern, "--", path]

        async def act(attempt: Attempt, box: AsyncSandbox) -> ToolReply:
            async def start() -> AsyncCommand:
                return await box.commands.start(words, timeout="default", output_limit=MOST_OUTPUT, id=attempt.id)

            return await start_and_wait(attempt, box, start, found)

        def found(result: CommandResult) -> ToolReply:
            if result.exit_code == 1 and not result.stdout:
                return ToolReply(text="no match", artifact=_ending(result), error=False)
            matches = result.stdout.splitlines()
            if result.exit_code not in {0, 1, 2} or not matches:
                return describe_result(result)
            if len(matches) > MOST_MATCHES:
                matches = [*matches[:MOST_MATCHES], f"[{len(matches) - MOST_MATCHES} more; narrow the search]"]
            return ToolReply(text=shorten("\n".join(matches)), artifact=_ending(result), error=False)

        asked = {"pattern": pattern, "path": path, "names": names}
        return await perform(runtime, workspace, "search_files", asked, " ".join(words), act)

    functions = (run_command, python, read_file, write_file, edit_file, list_files, search_files)
    return [StructuredTool.from_function(coroutine=function) for function in functions]


async def start_and_wait(
    attempt: Attempt,
    box: AsyncSandbox,
    start: Callable[[], Awaitable[AsyncCommand]],
    describe: Callable[[CommandResult], ToolReply] | None = None,
) -> ToolReply:
    """Start a command and wait until it ends. If an earlier try has started it, only wait."""
    try:
        command = await attempt.workspace.started(start)
    except NotRunning:
        raise
    except Conflict as error:  # this id, or this approval, was used before
        command = box.commands.get(attempt.id)
        try:
            await command.info()
        except NotFound:
            raise Conflict(
                f"{error.detail}; how it ended is not known any more",
                field=error.field,
                hint="look at what it did before you run it again",
            ) from None
    attempt.workspace.follow(command)
    try:
        result = await command.wait()
    finally:
        attempt.workspace.unfollow(command)
    return (describe or describe_result)(result)


def describe_result(result: CommandResult) -> ToolReply:
    """Describe a finished command: its output, then how it ended, unless it succeeded."""
    parts = []
    if result.stdout:
        parts.append(shorten(result.stdout.rstrip("\n")))
    if result.stderr:
        parts.append(f"[standard error]\n{shorten(result.stderr.rstrip(chr(10)))}")
    if result.dropped_bytes:
        parts.append(f"[{result.dropped_bytes} more bytes of output were not kept]")
    if not result.ok or result.timed_out:
        parts.append(f"[{ending(result)}]")
    return ToolReply(text="\n".join(parts) or "(no output)", artifact=_ending(result), error=False)


def shorten(text: str, most: int = MOST_CHARACTERS) -> str:
    """Shorten a text to its beginning and its end, with a remark between them."""
    half = most // 2
    return cut_middle(text, f"[… {len(text) - most} characters left out …]", head=most - half, tail=half)


def _ending(result: CommandResult) -> dict[str, object]:
    return result.model_dump(exclude={"stdout", "stderr", "stdout_base64", "stderr_base64"})


def _lines_of(path: str, data: bytes, first: int, count: int) -> ToolReply:
    if b"\0" in data[:8192]:
        text = f"'{path}' is not a text file; read it with a command"
        return ToolReply(text=text, artifact={"path": path, "binary": True}, error=True)
    whole = len(data) <= MOST_READ
    lines = data[:MOST_READ].decode("utf-8", "replace").splitlines()
    shown = lines[first - 1 : first - 1 + count]
    text = shorten("\n".join(shown)) or ("(empty)" if not lines else f"(there are {len(lines)} lines)")
    if first - 1 + len(shown) < len(lines):
        text += f"\n[lines {first} to {first - 1 + len(shown)} of {len(lines)}]"
    if not whole:
        text += f"\n[only the first {MOST_READ} bytes were read]"
    return ToolReply(text=text, artifact={"path": path, "lines": len(lines), "whole": whole}, error=False)


def _entry(info: FileInfo) -> dict[str, object]:
    return {"path": info.path, "size": info.size}


def _described(info: FileInfo) -> str:
    if info.kind is FileKind.DIRECTORY:
        return f"{printable(info.path)}/"
    if info.kind is FileKind.SYMLINK:
        return f"{printable(info.path)} -> {printable(info.target or '?')}"
    return f"{printable(info.path)} ({info.size} bytes)"
