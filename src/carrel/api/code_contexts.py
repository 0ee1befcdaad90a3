"""Code contexts: Python interpreters that keep their variables from cell to cell."""

from __future__ import annotations

from typing import Annotated

from starlette.requests import Request
from starlette.responses import Response

from carrel.api.commands import EVENTS
from carrel.api.guard import GuardedRouter
from carrel.api.parameters import Path, Query
from carrel.api.parts import Plane, SandboxId, Who, as_json, body_of, caller_of, event_stream, plane_of
from carrel.models import CellRequest, CellResult, CodeContextInfo, CodeContextList, CodeContextName
from carrel.models import operations as op

router = GuardedRouter(tags=["python"])
Name = Annotated[CodeContextName, Path(alias="name", description="name of a code context")]
CellId = Annotated[str, Path(alias="cell", max_length=128, description="id of a cell")]
_ID_HEADER = {"Carrel-Cell-Id": {"description": "id of the cell", "schema": {"type": "string"}}}


@router.operation(op.RUN_CELL, "Run a cell to its end", CellResult, 404, 409, 413, 422, 429, 502, parses=CellRequest)
async def run_cell(request: Request) -> Response:
    """After the cells before it. The code context is created if there is none of this name."""
    wanted, names = await body_of(request, CellRequest), request.path_params
    result = await plane_of(request).code_contexts.run_cell(caller_of(request), names["id"], names["name"], wanted)
    return Response(result.model_dump_json(), media_type="application/json")


@router.operation(op.LIST_CODE_CONTEXTS, "The code contexts of a sandbox", CodeContextList, 404, 409, 502)
async def list_code_contexts(id: SandboxId, plane: Plane, caller: Who) -> Response:
    """Oldest first."""
    return as_json(await plane.code_contexts.list(caller, id))


@router.operation(op.GET_CODE_CONTEXT, "One code context", CodeContextInfo, 404, 409, 502)
async def get_code_context(id: SandboxId, name: Name, plane: Plane, caller: Who) -> Response:
    """Idle, busy, or dead until the next cell starts it again."""
    return as_json(await plane.code_contexts.get(caller, id, name))


@router.operation(op.DELETE_CODE_CONTEXT, "End a code context", None, 404, 409, 502)
async def delete_code_context(id: SandboxId, name: Name, plane: Plane, caller: Who) -> Response:
    """With all its processes; its cells are forgotten."""
    await plane.code_contexts.delete(caller, id, name)
    return Response(status_code=204)


@router.operation(op.INTERRUPT_CODE_CONTEXT, "Interrupt the cell that runs", CodeContextInfo, 404, 409, 422, 429, 502)
async def interrupt_code_context(id: SandboxId, name: Name, plane: Plane, caller: Who) -> Response:
    """Like Ctrl-C; the variables stay. Does nothing when no cell runs."""
    return as_json(await plane.code_contexts.interrupt(caller, id, name))


@router.operation(op.RESTART_CODE_CONTEXT, "Restart a code context", CodeContextInfo, 404, 409, 422, 429, 502)
async def restart_code_context(id: SandboxId, name: Name, plane: Plane, caller: Who) -> Response:
    """Ends the running cell, drops the waiting ones, and deletes the variables."""
    return as_json(await plane.code_contexts.restart(caller, id, name))


@router.operation(
    op.STREAM_CELL, "Run a cell and stream its output", {**EVENTS, "headers": _ID_HEADER}, 404, 409, 413, 422, 429, 502
)
async def stream_cell(
    id: SandboxId, name: Name, body: CellRequest, plane: Plane, caller: Who, request: Request
) -> Response:
    """Rich results are in the result of the cell: get it by the id in the header."""
    contexts = plane.code_contexts
    info = await contexts.start_cell(caller, id, name, body)
    chunks = contexts.cell_output(caller, id, name, info.id)
    return await event_stream(request, chunks, headers={"carrel-cell-id": info.id})


@router.operation(op.GET_CELL, "Wait for the result of a cell", CellResult, 404, 409, 422, 429, 502)
async def get_cell(id: SandboxId, name: Name, cell: CellId, plane: Plane, caller: Who) -> Response:
    """Answers when the cell has ended."""
    return as_json(await plane.code_contexts.get_cell(caller, id, name, cell))


@router.operation(op.CELL_OUTPUT, "The output of a cell, from an offset on", EVENTS, 404, 409, 502)
async def get_cell_output(
    id: SandboxId,
    name: Name,
    cell: CellId,
    plane: Plane,
    caller: Who,
    request: Request,
    *,
    offset: Annotated[int, Query(ge=0, le=10**15)] = 0,
    follow: bool = True,
) -> Response:
    """With `follow` until the cell ends, else the output so far."""
    chunks = plane.code_contexts.cell_output(caller, id, name, cell, offset=offset, follow=follow)
    return await event_stream(request, chunks, offset=offset)
