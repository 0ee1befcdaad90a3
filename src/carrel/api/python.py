"""Python code in fresh processes. A started call is a command: stream it, send it input, signal it by its id."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from carrel.api.commands import EVENTS, ID_HEADER
from carrel.api.guard import GuardedRouter
from carrel.api.parts import Plane, SandboxId, Who, as_json, body_of, caller_of, event_stream, plane_of
from carrel.models import CommandInfo, PythonRequest, PythonResult
from carrel.models.operations import RUN_PYTHON, START_PYTHON, STREAM_PYTHON

router = GuardedRouter(tags=["python"])


@router.operation(
    RUN_PYTHON, "Run Python code to its end", PythonResult, 404, 409, 413, 422, 429, 502, parses=PythonRequest
)
async def run_python(request: Request) -> Response:
    """In a fresh process of a warm interpreter. An exception of the code is a result, not an error."""
    wanted = await body_of(request, PythonRequest)
    return as_json(await plane_of(request).python.run(caller_of(request), request.path_params["id"], wanted))


@router.operation(
    START_PYTHON, "Start Python code in the background", CommandInfo, 404, 409, 413, 422, 429, 502, status=201
)
async def start_python(id: SandboxId, body: PythonRequest, plane: Plane, caller: Who) -> Response:
    """Answers at once; the call is a command from now on."""
    return as_json(await plane.python.start(caller, id, body), 201)


@router.operation(
    STREAM_PYTHON,
    "Start Python code and stream its output",
    {**EVENTS, "headers": ID_HEADER},
    404,
    409,
    413,
    422,
    429,
    502,
)
async def stream_python(id: SandboxId, body: PythonRequest, plane: Plane, caller: Who, request: Request) -> Response:
    """It continues when the caller disconnects; attach again with the id of the command and the last offset."""
    info = await plane.python.start(caller, id, body)
    chunks = plane.operations.command_output(caller, id, info.id)
    return await event_stream(request, chunks, headers={"carrel-command-id": info.id})
