"""The routes of a supervisor, one method for each, with the time and size that its answer may take.

Knows no caller and no policy. Answers come from inside a sandbox: they are checked before they are returned.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict
from typing import Literal

from pydantic import Field, ValidationError

from carrel.control.operations.checks import GRACE, Emptied, check, checked_result, json_object, query_of, result_size
from carrel.control.supervisor.connection import (
    Json,
    SupervisorConnection,
    SupervisorDownload,
    SupervisorStream,
)
from carrel.control.supervisor.frames import FrameReader
from carrel.errors import NotFound, SandboxLost
from carrel.models import (
    MAX_OUTPUT_BYTES,
    Answer,
    CellResult,
    CodeContextInfo,
    CodeContextList,
    CommandInfo,
    CommandList,
    CommandResult,
    ExecuteResult,
    FileInfo,
    McpLog,
    McpState,
    PortList,
    PythonResult,
    SupervisorHealth,
)
from carrel.models.operations import LIST, SMALL, A, ForwardedOperation, Q
from carrel.primitives.spiffe import Svid
from carrel.tracing import span

SHORT_S = 30.0
HEALTH_S = 5.0
START_PYTHON_S = 90.0
"""How long an interpreter may take to start: it may import large packages."""
START_MCP_S = 60.0
SEND_S = 45.0
_CREATED = 201
_BEYOND = 10**15
"""An offset that no output reaches."""
INPUT_S = 86_400.0
"""How long a command may take to read its input."""
LARGEST_RESULT = result_size(MAX_OUTPUT_BYTES)
LARGEST_CELL = 64 * 1024 * 1024


class McpProcess(Answer):
    """The process of one MCP server, as its supervisor describes it."""

    name: str = Field(max_length=64)
    state: McpState
    incarnation: int = 0
    started: int = 0
    restarts: int = 0
    reason: str | None = Field(default=None, max_length=4096)
    retry_in_s: float | None = None


class _McpProcesses(Answer):
    items: list[McpProcess] = Field(max_length=64)


class SupervisorClient(SupervisorConnection):
    """The supervisor of one sandbox. Ids and names have been checked by the caller."""

    # commands

    async def run_command(self, body: bytes, timeout: float | None, output_limit: int) -> CommandResult:
        deadline = None if timeout is None else timeout + GRACE
        answer = await self.request(
            "POST", "/commands?wait=1", body, deadline=deadline, max_bytes=result_size(output_limit)
        )
        return checked_result(answer, CommandResult)

    async def start_command(self, body: bytes) -> CommandInfo:
        return await self._info("/commands", body, SHORT_S)

    async def follow_command(self, body: bytes, command_id: str) -> SupervisorDownload:
        """Start a command under an id that the caller chose, and stream its output as frames."""
        with span("supervisor", method="POST", path="/commands"):
            stream = await self.download("/commands?follow=1", body, method="POST", idle=None)
        if stream.status == _CREATED:  # a supervisor of an older server, which has only started it
            stream.close()
            return await self.command_output(command_id, 0, follow=True)
        return stream

    async def list_commands(self) -> CommandList:
        return check(CommandList, await self._json("GET", "/commands", limit=LIST))

    async def get_command(self, command_id: str) -> CommandInfo:
        return check(CommandInfo, await self._json("GET", f"/commands/{command_id}"))

    async def command_result(self, command_id: str) -> CommandResult:
        path = f"/commands/{command_id}/result"
        return checked_result(await self.request("GET", path, deadline=None, max_bytes=LARGEST_RESULT), CommandResult)

    async def command_output(self, command_id: str, offset: int, *, follow: bool) -> SupervisorDownload:
        """Stream the output of a command as frames."""
        return await self._output(f"/commands/{command_id}", offset, follow=follow)

    async def command_end(self, command_id: str) -> CommandInfo:
        """Wait until a command has ended. Its output is not sent."""
        return await self._end(await self.command_output(command_id, _BEYOND, follow=True))

    async def send_input(self, command_id: str, data: bytes, *, close: bool) -> None:
        """Write to the standard input of a command. Waits for as long as the command does not read it."""
        path = f"/commands/{command_id}/stdin{query_of(close=close)}"
        await self.request("POST", path, data, deadline=INPUT_S, max_bytes=SMALL)

    async def signal_command(self, command_id: str, body: Json) -> None:
        await self._json("POST", f"/commands/{command_id}/signal", body)

    async def resize_terminal(self, command_id: str, body: Json) -> None:
        await self._json("POST", f"/commands/{command_id}/resize", body)

    async def delete_command(self, command_id: str) -> None:
        """Kill a command with its whole process tree, and forget it."""
        await self._json("DELETE", f"/commands/{command_id}")

    async def execute(self, body: Json, timeout: float | None) -> ExecuteResult:
        deadline = None if timeout is None else timeout + GRACE
        answer = await self.request_json("POST", "/execute", body, deadline=deadline, max_bytes=LARGEST_RESULT)
        return check(ExecuteResult, answer)

    # files

    async def read_file(self, path: str, offset: int | None, length: int | None) -> SupervisorDownload:
        """Stream the bytes of a file."""
        return await self.download(f"/files/content{query_of(path=path, offset=offset, length=length)}")

    async def write_file(
        self, path: str, content: AsyncIterator[bytes] | bytes, *, mode: str | None, parents: bool, exclusive: bool
    ) -> FileInfo:
        """Write a file atomically."""
        target = f"/files/content{query_of(path=path, mode=mode, parents=parents, exclusive=exclusive)}"
        if isinstance(content, bytes):
            answer = await self.request("PUT", target, content, deadline=60.0, max_bytes=SMALL)
            return check(FileInfo, json_object(answer))
        return check(FileInfo, await self.upload("PUT", target, content))

    async def forward(self, operation: ForwardedOperation[Q, A], request: Q) -> A:
        method, _, path = operation.supervisor.partition(" ")
        body = request.model_dump(exclude_none=True) if operation.has_body else None
        query = "" if operation.has_body else query_of(**request.model_dump())
        answer = await self.request_json(
            method, path + query, body, deadline=operation.deadline, max_bytes=operation.largest_result
        )
        return check(operation.result, answer)

    # Python

    async def run_python(self, body: bytes, timeout: float, output_limit: int) -> PythonResult:
        answer = await self.request(
            "POST",
            "/python?wait=1",
            body,
            deadline=timeout + GRACE + START_PYTHON_S,
            max_bytes=result_size(output_limit) + SMALL,
        )
        return checked_result(answer, PythonResult)

    async def start_python(self, body: bytes) -> CommandInfo:
        return await self._info("/python", body, SHORT_S + START_PYTHON_S)

    async def put_packages(self, environment: str, imports: Sequence[str]) -> None:
        """Set the environment of the sandbox's Python, and the modules to import ahead."""
        await self._json("PUT", "/python/packages", {"env": environment, "imports": list(imports)})

    async def run_cell(self, context: str, body: bytes) -> tuple[CellResult, int]:
        """Run a cell after the cells before it. Only the sandbox knows how long those take. Returns the size of the
        answer too.
        """
        return await self._cell("POST", f"/contexts/{context}/cells?wait=1", body)

    async def start_cell(self, context: str, body: bytes) -> CommandInfo:
        return await self._info(f"/contexts/{context}/cells", body, SHORT_S + START_PYTHON_S)

    async def get_cell(self, context: str, cell_id: str) -> tuple[CellResult, int]:
        """Wait for the result of a cell. Returns the size of the answer too."""
        return await self._cell("GET", f"/contexts/{context}/cells/{cell_id}")

    async def cell_output(self, context: str, cell_id: str, offset: int, *, follow: bool) -> SupervisorDownload:
        """Stream the output of a cell as frames."""
        return await self._output(f"/contexts/{context}/cells/{cell_id}", offset, follow=follow)

    async def cell_end(self, context: str, cell_id: str) -> CommandInfo:
        """Wait until a cell has ended. Its output is not sent."""
        return await self._end(await self.cell_output(context, cell_id, _BEYOND, follow=True))

    async def list_code_contexts(self) -> CodeContextList:
        return check(CodeContextList, await self._json("GET", "/contexts", limit=LIST))

    async def code_context(
        self, context: str, action: Literal["interrupt", "restart"] | None = None
    ) -> CodeContextInfo:
        """Return the state of a code context, after an action if one is given."""
        method, path = ("GET", "") if action is None else ("POST", f"/{action}")
        deadline = GRACE + START_PYTHON_S
        answer = await self.request_json(method, f"/contexts/{context}{path}", deadline=deadline, max_bytes=SMALL)
        return check(CodeContextInfo, answer)

    async def delete_code_context(self, context: str) -> None:
        """End a code context and forget its cells."""
        await self._json("DELETE", f"/contexts/{context}")

    # MCP servers

    async def declare_mcp(self, name: str, declaration: Json) -> McpProcess:
        """Declare an MCP server, or declare it again."""
        return check(McpProcess, await self._json("PUT", f"/mcp/{name}", declaration))

    async def connect_mcp(self, name: str) -> SupervisorDownload:
        """Start the process of an MCP server if it does not run, and stream its messages."""
        return await self.download(f"/mcp/{name}/connect", method="POST", deadline=START_MCP_S, idle=None)

    async def send_mcp(self, name: str, incarnation: int, line: bytes) -> None:
        """Send a message to one process of an MCP server."""
        path = f"/mcp/{name}/send{query_of(incarnation=incarnation)}"
        await self.request("POST", path, line, deadline=SEND_S, max_bytes=SMALL)

    async def mcp_processes(self) -> dict[str, McpProcess]:
        """Return every declared MCP server by its name."""
        return {each.name: each for each in check(_McpProcesses, await self._json("GET", "/mcp")).items}

    async def stop_mcp(self, name: str) -> None:
        """End the process of an MCP server, if there is one."""
        try:
            await self._json("POST", f"/mcp/{name}/stop", {})
        except NotFound:
            return

    async def forget_mcp(self, name: str) -> None:
        """End the process of an MCP server, and forget its declaration."""
        try:
            await self._json("DELETE", f"/mcp/{name}")
        except NotFound:
            return

    async def mcp_log(self, name: str, offset: int, limit: int) -> McpLog:
        """Return a part of the standard error of an MCP server."""
        path = f"/mcp/{name}/log{query_of(offset=offset, limit=limit)}"
        return check(McpLog, await self._json("GET", path, limit=4 * SMALL))

    # ports

    async def list_ports(self, port: int | None, wait_s: float) -> PortList:
        """Return the open ports; with `port`, once that one is open or the time is over."""
        query = query_of(port=port, wait_ms=round(wait_s * 1000))
        found = await self.request_json("GET", f"/ports{query}", deadline=SHORT_S + wait_s, max_bytes=SMALL)
        return check(PortList, found)

    async def open_port(self, port: int) -> SupervisorStream:
        """Connect to the server on a port of the sandbox; `PortNotOpen`."""
        return await self.stream(f"/ports/{port}/stream", port, deadline=SHORT_S)

    # upkeep

    async def health(self) -> SupervisorHealth:
        """Return what runs in the sandbox."""
        return check(SupervisorHealth, await self.request_json("GET", "/health", deadline=HEALTH_S, max_bytes=SMALL))

    async def empty(self) -> Emptied:
        """Bring the sandbox back to its first state; the first call records that state."""
        return check(Emptied, await self._json("POST", "/empty"))

    async def put_secrets(self, values: Mapping[str, bytes]) -> None:
        """Replace the secrets inside the sandbox."""
        secrets = {name: b64encode(value).decode() for name, value in values.items()}
        await self._json("PUT", "/secrets", {"secrets": secrets})

    async def put_identity(self, svid: Svid, refused: Sequence[str]) -> None:
        """Give the supervisor of a sandbox on another machine a new SVID, and the IDs of servers that it refuses."""
        await self._json("PUT", "/identity", {"credentials": asdict(svid), "refused": list(refused)})

    async def void_run(self, run: str) -> bool | None:
        """Ask whether a run was begun; a supervisor that says no refuses it from now on. None: it does not say."""
        answer = await self.request_json("POST", f"/runs/{run}/void", deadline=HEALTH_S, max_bytes=1024)
        begun = answer.get("begun")
        return begun if isinstance(begun, bool) else None

    # inner

    async def _json(self, method: str, path: str, body: Json | None = None, *, limit: int = SMALL) -> Json:
        return await self.request_json(method, path, body, deadline=SHORT_S, max_bytes=limit)

    async def _info(self, path: str, body: bytes, deadline: float) -> CommandInfo:
        return check(
            CommandInfo, json_object(await self.request("POST", path, body, deadline=deadline, max_bytes=SMALL))
        )

    async def _end(self, frames: SupervisorDownload) -> CommandInfo:
        reader = FrameReader()
        try:
            async for data in frames:
                for chunk in reader.feed(data):
                    if chunk.stream == "end":
                        return check(CommandInfo, json_object(chunk.data))
        finally:
            frames.close()
        raise SandboxLost("the sandbox ended the output in the middle")

    async def _output(self, path: str, offset: int, *, follow: bool) -> SupervisorDownload:
        query = query_of(offset=offset, follow=follow)
        return await self.download(f"{path}/output{query}", idle=None if follow else SHORT_S)

    async def _cell(self, method: str, path: str, body: bytes | None = None) -> tuple[CellResult, int]:
        answer = await self.request(method, path, body, deadline=None, max_bytes=LARGEST_CELL)
        try:
            return CellResult.model_validate_json(answer), len(answer)
        except ValidationError:
            raise SandboxLost("the sandbox's answer is not a CellResult") from None
