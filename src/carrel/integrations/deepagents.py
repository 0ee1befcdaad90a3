"""A carrel workspace as the sandbox backend of deepagents: governed commands and files.

Files of the workspace use carrel's file operations, so file rules decide on them. For the rest (search, and paths
outside the workspace) deepagents runs commands, on which shell rules decide.
"""

from __future__ import annotations

import asyncio
import base64
import posixpath
import shlex
import uuid
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from carrel.extras import using

with using("deepagents"):
    from deepagents.backends.protocol import (
        DeleteResult,
        EditResult,
        ExecuteResponse,
        FileData,
        FileDownloadResponse,
        FileUploadResponse,
        LsResult,
        ReadResult,
        WriteResult,
    )
    from deepagents.backends.sandbox import BaseSandbox
    from langgraph.config import get_config
    from langgraph.runtime import get_runtime

from carrel.client import AsyncCommand, AsyncSandbox
from carrel.errors import (
    ApprovalNeeded,
    Denied,
    EditMismatch,
    FileMissing,
    InvalidPath,
    InvalidRequest,
    Unsupported,
)
from carrel.integrations.langgraph.operation import Act, Attempt, GraphCall, ToolReply, graph_call, refused, run_once
from carrel.integrations.langgraph.tools import start_and_wait
from carrel.integrations.langgraph.workspace import Workspace, own_id
from carrel.integrations.tool_results import ending, joined
from carrel.models import CommandResult, FileKind
from carrel.models.files import MOST_LISTED

MOST_OUTPUT = 4 * 1024 * 1024
MOST_FILE = 16 * 1024 * 1024
MOST_TEXT = 500 * 1024
MOST_BINARY = 500 * 1024
EMPTY = "System reminder: File exists but has empty contents"
MOST_DOWNLOAD = 96 * 1024 * 1024
_MISSING, _DIRECTORY = 44, 45

T = TypeVar("T")


class CarrelBackend(BaseSandbox):
    """A backend for deepagents.

        agent = create_deep_agent(backend=CarrelBackend(), context_schema=Workspace)
        await agent.ainvoke(given, config, context=Workspace(client))

    The workspace is that of the run, or else the given one. An operation that needs approval interrupts a graph that
    runs asynchronously. The blocking methods do not interrupt: they tell the model that approval is needed.
    """

    def __init__(self, workspace: Workspace | None = None):
        self._workspace = workspace
        self._blocks = False

    @property
    def id(self) -> str:
        """The context, if it is fixed."""
        return (self._workspace and self._workspace.context_id) or "carrel"

    # commands

    async def aexecute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Run a command with `/bin/sh`. A refusal is returned as its output."""

        async def act(attempt: Attempt, box: AsyncSandbox) -> ToolReply:
            async def start() -> AsyncCommand:
                return await box.commands.start(
                    command,
                    timeout="default" if timeout is None else timeout,
                    output_limit=MOST_OUTPUT,
                    id=attempt.id,
                )

            return await start_and_wait(attempt, box, start, _joined)

        reply = await self._do("execute", {"command": command, "timeout": timeout}, command, act)
        artifact = reply["artifact"]
        code = artifact.get("exit_code")
        if reply["error"]:
            return ExecuteResponse(output=reply["text"], exit_code=126)
        ending = 124 if artifact.get("timed_out") else 137
        return ExecuteResponse(
            output=reply["text"],
            exit_code=code if isinstance(code, int) else ending,
            truncated=bool(artifact.get("truncated")),
        )

    # files

    async def als(self, path: str) -> LsResult:
        """List a directory."""

        async def act(_attempt: Attempt, box: AsyncSandbox) -> ToolReply:
            found = await box.files.list(path, limit=MOST_LISTED)
            entries = [
                {
                    "path": posixpath.join(path, posixpath.basename(info.path)),
                    "is_dir": info.kind is FileKind.DIRECTORY,
                    "size": info.size,
                    "modified_at": info.modified_at.isoformat(),
                }
                for info in found
            ]
            return ToolReply(text="", artifact={"entries": entries}, error=False)

        reply = await self._do_in_workspace("ls", path, {}, act)
        if reply is None:
            return await super().als(path)
        if reply["error"]:
            return LsResult(error=f"Path '{path}': {_why(reply, 'path_not_found')}")
        entries: Any = reply["artifact"]["entries"]  # a `FileInfo` each, as deepagents has them
        return LsResult(entries=entries)

    async def aread(self, file_path: str, offset: int = 0, limit: int = 2000) -> ReadResult:
        """Read lines of a text file, or all of a small binary file."""

        async def act(_attempt: Attempt, box: AsyncSandbox) -> ToolReply:
            data = await box.files.read(file_path, length=MOST_FILE + 1)
            return ToolReply(text="", artifact=_window(data, max(0, offset), max(0, limit)), error=False)

        reply = await self._do_in_workspace("read", file_path, {"offset": offset, "limit": limit}, act)
        if reply is None:
            return await super().aread(file_path, offset, limit)
        if reply["error"]:
            return ReadResult(error=f"File '{file_path}': {_why(reply, 'file_not_found')}")
        shown: dict[str, Any] = dict(reply["artifact"])
        if "error" in shown:
            return ReadResult(error=f"File '{file_path}': {shown['error']}")
        data = FileData(content=shown.pop("content"), encoding=shown.pop("encoding"))
        return ReadResult(file_data=data, **shown)

    async def awrite(self, file_path: str, content: str) -> WriteResult:
        """Create or replace a file."""

        async def act(_attempt: Attempt, box: AsyncSandbox) -> ToolReply:
            await box.files.write(file_path, content)
            return ToolReply(text="", artifact={}, error=False)

        reply = await self._do_in_workspace("write", file_path, {"content": content}, act)
        if reply is None:
            return await super().awrite(file_path, content)
        if reply["error"]:
            return WriteResult(error=f"Failed to write file '{file_path}': {reply['text']}")
        return WriteResult(path=file_path)

    async def aedit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> EditResult:
        """Replace a text. The file may have other line endings than `old_string`."""
        if not old_string:
            return EditResult(error="Error: old_string is empty")

        async def act(attempt: Attempt, box: AsyncSandbox) -> ToolReply:
            done = await _edited(box, file_path, old_string, new_string, replace_all=replace_all, id=attempt.id)
            return ToolReply(text="", artifact={"replaced": done}, error=False)

        arguments = {"old_string": old_string, "new_string": new_string, "replace_all": replace_all}
        reply = await self._do_in_workspace("edit", file_path, arguments, act)
        if reply is None:
            return await super().aedit(file_path, old_string, new_string, replace_all)
        if reply["error"]:
            return EditResult(error=_edit_error(reply, file_path, old_string))
        replaced: Any = reply["artifact"]["replaced"]
        return EditResult(path=file_path, occurrences=replaced)

    async def adelete(self, file_path: str) -> DeleteResult:
        """Delete a file, or a directory with its content."""

        async def act(_attempt: Attempt, box: AsyncSandbox) -> ToolReply:
            await box.files.delete(file_path, recursive=True)
            return ToolReply(text="", artifact={}, error=False)

        reply = await self._do_in_workspace("delete", file_path, {}, act)
        if reply is None:
            quoted = shlex.quote(file_path)
            response = await self.aexecute(f"ls -d {quoted} >/dev/null && rm -rf {quoted}")
            return DeleteResult(error=response.output) if response.exit_code else DeleteResult(path=file_path)
        if reply["error"]:
            return DeleteResult(error=f"Error: File '{file_path}': {_why(reply, 'not found')}")
        return DeleteResult(path=file_path)

    async def aupload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """Write files; each result has its own error."""
        return [FileUploadResponse(path=path, error=await self._upload(path, data)) for path, data in files]

    async def adownload_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """Read whole files; each result has its own error."""
        return [await self._download(path) for path in paths]

    async def _upload(self, path: str, data: bytes) -> str | None:
        if not path.startswith("/"):
            return "invalid_path"

        async def act(_attempt: Attempt, box: AsyncSandbox) -> ToolReply:
            await box.files.write(path, data)
            return ToolReply(text="", artifact={}, error=False)

        reply = await self._do_in_workspace("upload", path, {"bytes": len(data)}, act)
        if reply is not None:
            return _file_error(reply) if reply["error"] else None
        quoted, above = shlex.quote(path), shlex.quote(posixpath.dirname(path))
        given = base64.b64encode(data).decode()

        async def act_outside(attempt: Attempt, box: AsyncSandbox) -> ToolReply:
            async def start() -> AsyncCommand:
                line = f"mkdir -p {above} && base64 -d > {quoted}"
                return await box.commands.start(line, timeout="default", stdin=given, id=attempt.id)

            return await start_and_wait(attempt, box, start, _joined)

        reply = await self._do("upload", {"path": path, "bytes": len(data)}, f"upload {path}", act_outside)
        return "permission_denied" if reply["error"] or reply["artifact"].get("exit_code") != 0 else None

    async def _download(self, path: str) -> FileDownloadResponse:
        if not path.startswith("/"):
            return FileDownloadResponse(path=path, error="invalid_path")
        # A download changes nothing and may be large, so it is not a task in the checkpoint and does not interrupt.
        call = self._call("download", {"path": path}, path, _nothing)
        box = await call.workspace.sandbox(call.context_id)
        try:
            try:
                return FileDownloadResponse(path=path, content=await box.files.read(path))
            except InvalidPath:
                return await _downloaded(box, path)
        except FileMissing:
            return FileDownloadResponse(path=path, error="file_not_found")
        except (Denied, InvalidRequest):
            return FileDownloadResponse(path=path, error="permission_denied")

    # how it is done

    def _call(self, name: str, arguments: Mapping[str, object], summary: str, act: Act) -> GraphCall:
        if self._blocks:  # the client of the run belongs to another loop
            return graph_call(None, self._workspace, None, name, arguments, summary, act)
        thread_id, context = None, None
        try:
            thread_id, context = (get_config().get("configurable") or {}).get("thread_id"), get_runtime().context
        except (RuntimeError, KeyError):
            pass  # used without a graph
        return graph_call(context, self._workspace, thread_id, name, arguments, summary, act)

    async def _do(self, name: str, arguments: Mapping[str, object], summary: str, act: Act) -> ToolReply:
        call = self._call(name, arguments, summary, act)
        if call.thread_id is not None:
            return await run_once(call)
        try:
            return await call.run(own_id(uuid.uuid4().hex))
        except ApprovalNeeded as needed:
            return refused(needed)

    async def _do_in_workspace(
        self, name: str, path: str, arguments: Mapping[str, object], act: Act
    ) -> ToolReply | None:
        """Run an operation in the workspace; None when the path is outside of it."""
        reply = await self._do(name, {"path": path, **arguments}, f"{name} {path}", act)
        outside = reply["error"] and reply["artifact"].get("code") == InvalidPath.code and path.startswith("/")
        return None if outside else reply

    # the same, blocking

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """As `aexecute`, blocking."""
        return self._blocking(lambda other: other.aexecute(command, timeout=timeout))

    def ls(self, path: str) -> LsResult:
        """As `als`, blocking."""
        return self._blocking(lambda other: other.als(path))

    def read(self, file_path: str, offset: int = 0, limit: int = 2000) -> ReadResult:
        """As `aread`, blocking."""
        return self._blocking(lambda other: other.aread(file_path, offset, limit))

    def write(self, file_path: str, content: str) -> WriteResult:
        """As `awrite`, blocking."""
        return self._blocking(lambda other: other.awrite(file_path, content))

    def edit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> EditResult:
        """As `aedit`, blocking."""
        return self._blocking(lambda other: other.aedit(file_path, old_string, new_string, replace_all))

    def delete(self, file_path: str) -> DeleteResult:
        """As `adelete`, blocking."""
        return self._blocking(lambda other: other.adelete(file_path))

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """As `aupload_files`, blocking."""
        return self._blocking(lambda other: other.aupload_files(files))

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """As `adownload_files`, blocking."""
        return self._blocking(lambda other: other.adownload_files(paths))

    def _blocking(self, work: Callable[[CarrelBackend], Coroutine[Any, Any, T]]) -> T:
        """Run with an event loop and a client of its own, because connections belong to the loop that made them."""
        call = self._call("", {}, "", _nothing)

        async def alone() -> T:
            async with call.workspace.client_of_its_own() as client:
                other = CarrelBackend(Workspace(client, call.context_id, template=call.workspace.template))
                other._blocks = True
                return await work(other)

        return asyncio.run(alone())


async def _nothing(_attempt: Attempt, _box: AsyncSandbox) -> ToolReply:
    raise Unsupported("this call does nothing")


async def _downloaded(box: AsyncSandbox, path: str) -> FileDownloadResponse:
    """Download a file outside the workspace."""
    quoted = shlex.quote(path)
    result = await box.commands.run(
        f"test -e {quoted} || exit {_MISSING}; test -d {quoted} && exit {_DIRECTORY}; base64 -w0 {quoted}",
        output_limit=MOST_DOWNLOAD,
    )
    if result.ok and not result.truncated:
        return FileDownloadResponse(path=path, content=base64.b64decode(result.stdout))
    errors = {_MISSING: "file_not_found", _DIRECTORY: "is_directory"}
    return FileDownloadResponse(path=path, error=errors.get(result.exit_code or 0, "permission_denied"))


async def _edited(box: AsyncSandbox, path: str, old: str, new: str, *, replace_all: bool, id: str) -> int:
    """Edit a file, also when its line endings differ from those the model used."""
    plain = (old.replace("\r\n", "\n"), new.replace("\r\n", "\n"))
    forms = dict.fromkeys([(old, new), (plain[0].replace("\n", "\r\n"), plain[1].replace("\n", "\r\n")), plain])
    missing: EditMismatch | None = None
    for one, other in forms:
        try:
            return (await box.files.edit(path, one, other, replace_all=replace_all, id=id)).replaced
        except EditMismatch as error:
            if error.extra.get("occurrences") != 0:
                raise
            missing = missing or error
    assert missing is not None
    raise missing


def _joined(result: CommandResult) -> ToolReply:
    output = joined(result.stdout, result.stderr) if result.stderr else result.stdout
    if result.timed_out:
        output = joined(output, f"[{ending(result)}]")
    artifact: dict[str, object] = {
        "exit_code": result.exit_code,
        "timed_out": result.timed_out,
        "truncated": result.truncated,
    }
    return ToolReply(text=output, artifact=artifact, error=False)


def _window(data: bytes, offset: int, limit: int) -> dict[str, object]:
    """Return the lines of a text file from `offset`, with their position, or a binary file in base64."""
    if len(data) > MOST_FILE:
        return {"error": f"File exceeds {MOST_FILE} bytes; use a command to see some of it"}
    if not data:
        return {"content": EMPTY, "encoding": "utf-8"}
    try:
        text = data.decode()
    except UnicodeDecodeError:
        if len(data) > MOST_BINARY:
            return {"error": f"Binary file exceeds maximum preview size of {MOST_BINARY} bytes"}
        return {"content": base64.b64encode(data).decode(), "encoding": "base64"}
    if not limit:
        return {"content": "", "encoding": "utf-8", "no_lines_requested": True}
    lines = text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")
    shown = lines[offset : offset + limit]
    if not shown:
        return {"error": f"Line offset {offset} exceeds file length ({len(lines)} lines)"}
    content, count = "\n".join(shown), len(shown)
    if len(content) > MOST_TEXT:
        content = content[:MOST_TEXT]
        count = max(1, content.count("\n"))
        content += "\n\n[Output was truncated due to size limits. Continue with a larger offset or a smaller limit.]"
    end = offset + count
    return {
        "content": content,
        "encoding": "utf-8",
        "total_lines": len(lines),
        "start_line": offset + 1,
        "end_line": end,
        "next_offset": end if end < len(lines) else None,
    }


def _why(reply: ToolReply, missing: str) -> str:
    return missing if reply["artifact"].get("code") == FileMissing.code else reply["text"]


def _file_error(reply: ToolReply) -> str:
    return "file_not_found" if reply["artifact"].get("code") == FileMissing.code else "permission_denied"


def _edit_error(reply: ToolReply, path: str, old: str) -> str:
    artifact = reply["artifact"]
    if artifact.get("code") == FileMissing.code:
        return f"Error: File '{path}' not found"
    if artifact.get("code") != EditMismatch.code:
        return f"Error: {reply['text']}"
    if artifact.get("occurrences") == 0:
        return f"Error: String not found in file: '{old}'"
    return (
        f"Error: String '{old}' appears multiple times in file ({artifact.get('occurrences')} occurrences). "
        "Use replace_all=True to replace all, or include more of what is around it."
    )
