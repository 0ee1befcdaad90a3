"""Commands: run, start, stream, send input, signal, delete."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from carrel.api.guard import GuardedRouter
from carrel.api.parts import (
    NDJSON,
    SSE,
    Plane,
    SandboxId,
    Who,
    as_json,
    body_of,
    caller_of,
    event_stream,
    json_of,
    plane_of,
    query_of,
)
from carrel.control.operations.caller import Caller
from carrel.errors import InvalidRequest
from carrel.models import (
    CommandInfo,
    CommandList,
    CommandRequest,
    CommandResult,
    ExecuteRequest,
    ExecuteResult,
    OutputEvent,
    SignalRequest,
    TerminalSize,
)
from carrel.models import operations as op

router = GuardedRouter(tags=["commands"])

EVENTS: dict[str, Any] = {
    "description": "An `OutputEvent` per line, or per server-sent event if asked for; the last has `result`",
    "content": {
        NDJSON: {"schema": {"$ref": "#/components/schemas/OutputEvent"}},
        SSE: {"schema": {"$ref": "#/components/schemas/OutputEvent"}},
    },
}
EVENT_MODEL = OutputEvent
ID_HEADER = {"Carrel-Command-Id": {"description": "id of the command", "schema": {"type": "string"}}}


@router.operation(
    op.RUN_COMMAND, "Run a command to its end", CommandResult, 404, 409, 413, 429, 502, parses=CommandRequest
)
async def run_command(request: Request) -> Response:
    """Waits until the command ends or its deadline kills it; a non-zero exit code is a result, not an error."""
    wanted = await body_of(request, CommandRequest)
    result = await plane_of(request).operations.run_command(caller_of(request), request.path_params["id"], wanted)
    return Response(result.model_dump_json(), media_type="application/json")


@router.operation(
    op.START_COMMAND,
    "Start a command in the background",
    CommandInfo,
    404,
    409,
    413,
    429,
    502,
    status=201,
    parses=CommandRequest,
)
async def start_command(request: Request) -> Response:
    """Answers at once; read the output by id and offset. Without a `timeout` it runs until it ends or is deleted."""
    wanted = await json_of(request, CommandRequest)
    return as_json(
        await plane_of(request).operations.start_command(caller_of(request), request.path_params["id"], wanted), 201
    )


@router.operation(
    op.STREAM_COMMAND,
    "Start a command and stream its output",
    {**EVENTS, "headers": ID_HEADER},
    404,
    409,
    413,
    429,
    502,
    parses=CommandRequest,
)
async def stream_command(request: Request) -> Response:
    """The command continues when the caller disconnects; attach again with its id and the last offset."""
    operations, caller, sandbox = plane_of(request).operations, caller_of(request), request.path_params["id"]
    info = await operations.start_command(caller, sandbox, await json_of(request, CommandRequest), attended=True)
    chunks = operations.command_output(caller, sandbox, info.id)
    return await event_stream(request, chunks, headers={"carrel-command-id": info.id})


def _named(request: Request) -> tuple[Caller, str, str]:
    """Return the caller, and the ids of the sandbox and of the command."""
    return caller_of(request), request.path_params["id"], request.path_params["cid"]


@router.operation(op.LIST_COMMANDS, "List the commands of a sandbox", CommandList, 404, 409, 502)
async def list_commands(request: Request) -> Response:
    """Newest last."""
    return as_json(await plane_of(request).operations.list_commands(caller_of(request), request.path_params["id"]))


@router.operation(op.GET_COMMAND, "One command", CommandInfo, 404, 409, 502)
async def get_command(request: Request) -> Response:
    """Running or ended."""
    return as_json(await plane_of(request).operations.get_command(*_named(request)))


@router.operation(op.COMMAND_RESULT, "Wait for a command's end", CommandResult, 404, 409, 502)
async def get_command_result(request: Request) -> Response:
    """Answers when the command has ended."""
    return as_json(await plane_of(request).operations.command_result(*_named(request)))


class OutputQuery(BaseModel):
    """The query of the route that reads the output of a command."""

    model_config = ConfigDict(defer_build=True)

    offset: int = Field(default=0, ge=0, le=10**15)
    follow: bool = True


@router.operation(op.COMMAND_OUTPUT, "Output from an offset on", EVENTS, 404, 409, 502, queries=OutputQuery)
async def get_command_output(request: Request) -> Response:
    """With `follow` until the command ends, else the output so far."""
    asked = query_of(request, OutputQuery)
    operations = plane_of(request).operations
    chunks = operations.command_output(*_named(request), offset=asked.offset, follow=asked.follow)
    return await event_stream(request, chunks, offset=asked.offset)


class InputQuery(BaseModel):
    """The query of the route that writes to the standard input of a command."""

    model_config = ConfigDict(defer_build=True)

    close: bool = False


@router.operation(
    op.SEND_INPUT,
    "Write to the standard input of a command",
    None,
    404,
    409,
    413,
    502,
    openapi_extra={
        "requestBody": {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
    },
    queries=InputQuery,
)
async def send_input(request: Request) -> Response:
    """Writes the raw body; with `close` it closes the input afterwards."""
    asked = query_of(request, InputQuery)
    await plane_of(request).operations.send_input(*_named(request), await request.body(), close=asked.close)
    return Response(status_code=204)


@router.operation(op.SIGNAL_COMMAND, "Send a signal", None, 404, 409, 413, 502, parses=SignalRequest)
async def signal_command(request: Request) -> Response:
    """To the process group, or with `tree` to every process of the command."""
    body = await json_of(request, SignalRequest)
    if not body.signal.isalnum():
        raise InvalidRequest("a signal has a name such as TERM", field="signal", hint="use TERM, KILL, INT, HUP, …")
    await plane_of(request).operations.signal_command(*_named(request), body)
    return Response(status_code=204)


@router.operation(op.RESIZE_TERMINAL, "Resize a command's terminal", None, 404, 409, 413, 502, parses=TerminalSize)
async def resize_terminal(request: Request) -> Response:
    """Terminals only."""
    size = await json_of(request, TerminalSize)
    await plane_of(request).operations.resize_terminal(*_named(request), size)
    return Response(status_code=204)


@router.operation(op.DELETE_COMMAND, "Kill a command and forget it", None, 404, 409, 502)
async def delete_command(request: Request) -> Response:
    """Kills the whole process tree."""
    await plane_of(request).operations.delete_command(*_named(request))
    return Response(status_code=204)


@router.operation(op.EXECUTE, "Run code with files in and files out", ExecuteResult, 404, 409, 413, 422, 429, 502)
async def execute(id: SandboxId, body: ExecuteRequest, plane: Plane, caller: Who) -> Response:
    """Answers with the output and the names of the files produced."""
    return as_json(await plane.tools.execute(caller, id, body))
