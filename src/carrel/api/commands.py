"""Commands: run, start, stream, send input, signal, delete."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query, Request
from starlette.responses import Response

from carrel.api.guard import GuardedRouter
from carrel.api.parts import (
    NDJSON,
    SSE,
    CommandId,
    Plane,
    SandboxId,
    Who,
    as_json,
    body_of,
    caller_of,
    event_stream,
    plane_of,
)
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

router = GuardedRouter(prefix="/v1/sandboxes/{id}", tags=["commands"])

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
    op.START_COMMAND, "Start a command in the background", CommandInfo, 404, 409, 413, 429, 502, status=201
)
async def start_command(id: SandboxId, body: CommandRequest, plane: Plane, caller: Who) -> Response:
    """Answers at once; read the output by id and offset. Without a `timeout` it runs until it ends or is deleted."""
    return as_json(await plane.operations.start_command(caller, id, body), 201)


@router.operation(
    op.STREAM_COMMAND,
    "Start a command and stream its output",
    {**EVENTS, "headers": ID_HEADER},
    404,
    409,
    413,
    429,
    502,
)
async def stream_command(id: SandboxId, body: CommandRequest, plane: Plane, caller: Who, request: Request) -> Response:
    """The command continues when the caller disconnects; attach again with its id and the last offset."""
    info = await plane.operations.start_command(caller, id, body, attended=True)
    chunks = plane.operations.command_output(caller, id, info.id)
    return await event_stream(request, chunks, headers={"carrel-command-id": info.id})


@router.operation(op.LIST_COMMANDS, "List the commands of a sandbox", CommandList, 404, 409, 502)
async def list_commands(id: SandboxId, plane: Plane, caller: Who) -> Response:
    """Newest last."""
    return as_json(await plane.operations.list_commands(caller, id))


@router.operation(op.GET_COMMAND, "One command", CommandInfo, 404, 409, 502)
async def get_command(id: SandboxId, cid: CommandId, plane: Plane, caller: Who) -> Response:
    """Running or ended."""
    return as_json(await plane.operations.get_command(caller, id, cid))


@router.operation(op.COMMAND_RESULT, "Wait for a command's end", CommandResult, 404, 409, 502)
async def get_command_result(id: SandboxId, cid: CommandId, plane: Plane, caller: Who) -> Response:
    """Answers when the command has ended."""
    return as_json(await plane.operations.command_result(caller, id, cid))


@router.operation(op.COMMAND_OUTPUT, "Output from an offset on", EVENTS, 404, 409, 502)
async def get_command_output(
    id: SandboxId,
    cid: CommandId,
    plane: Plane,
    caller: Who,
    request: Request,
    *,
    offset: Annotated[int, Query(ge=0, le=10**15)] = 0,
    follow: bool = True,
) -> Response:
    """With `follow` until the command ends, else the output so far."""
    chunks = plane.operations.command_output(caller, id, cid, offset=offset, follow=follow)
    return await event_stream(request, chunks, offset=offset)


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
)
async def send_input(
    id: SandboxId, cid: CommandId, plane: Plane, caller: Who, request: Request, close: bool = False
) -> Response:
    """Writes the raw body; with `close` it closes the input afterwards."""
    await plane.operations.send_input(caller, id, cid, await request.body(), close=close)
    return Response(status_code=204)


@router.operation(op.SIGNAL_COMMAND, "Send a signal", None, 404, 409, 413, 502)
async def signal_command(id: SandboxId, cid: CommandId, body: SignalRequest, plane: Plane, caller: Who) -> Response:
    """To the process group, or with `tree` to every process of the command."""
    if not body.signal.isalnum():
        raise InvalidRequest("a signal has a name such as TERM", field="signal", hint="use TERM, KILL, INT, HUP, …")
    await plane.operations.signal_command(caller, id, cid, body)
    return Response(status_code=204)


@router.operation(op.RESIZE_TERMINAL, "Resize a command's terminal", None, 404, 409, 413, 502)
async def resize_terminal(id: SandboxId, cid: CommandId, body: TerminalSize, plane: Plane, caller: Who) -> Response:
    """Terminals only."""
    await plane.operations.resize_terminal(caller, id, cid, body)
    return Response(status_code=204)


@router.operation(op.DELETE_COMMAND, "Kill a command and forget it", None, 404, 409, 502)
async def delete_command(id: SandboxId, cid: CommandId, plane: Plane, caller: Who) -> Response:
    """Kills the whole process tree."""
    await plane.operations.delete_command(caller, id, cid)
    return Response(status_code=204)


@router.operation(op.EXECUTE, "Run code with files in and files out", ExecuteResult, 404, 409, 413, 422, 429, 502)
async def execute(id: SandboxId, body: ExecuteRequest, plane: Plane, caller: Who) -> Response:
    """Answers with the output and the names of the files produced."""
    return as_json(await plane.tools.execute(caller, id, body))
