"""Filespaces: sync with a workspace; read and write files whether a sandbox runs or not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, cast

from starlette.requests import Request
from starlette.responses import Response

from carrel.api.guard import GuardedRouter
from carrel.api.parameters import Query
from carrel.api.parts import ClosingStream, Context, FilePath, Plane, SandboxId, Who, as_json, raw_query, streamed_body
from carrel.models import FilespaceFile, FilespacePage, SyncRequest, SyncSummary
from carrel.models import operations as op
from carrel.models.base import MAX_PATH

router = GuardedRouter(tags=["filespaces"])

_BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


@router.operation(op.SYNC_FILESPACE, "Sync a workspace with its filespace", SyncSummary, 404, 409, 413, 429, 503)
async def sync_filespace(id: SandboxId, body: SyncRequest, plane: Plane, caller: Who) -> Response:
    """Push the changes of the workspace, pull those of the filespace, or both: a pull, then a push. The last writer
    wins.
    """
    return as_json(await plane.filespaces.sync(caller, id, body.direction))


@router.operation(op.LIST_FILESPACE, "List the files of a filespace", FilespacePage, 404, 409)
async def list_filespace(
    context_id: Context,
    plane: Plane,
    caller: Who,
    request: Request,
    *,
    prefix: Annotated[str, Query(max_length=MAX_PATH, description="prefix of the paths, such as `data/`")] = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(max_length=8192, description="`next` of the page before")] = None,
) -> Response:
    """In the order of their paths. Empty for a context without a filespace."""
    wanted = raw_query(request, "prefix") or prefix
    page = await plane.filespaces.list(caller, context_id, prefix=wanted, limit=limit, cursor=cursor)
    return as_json(page)


@router.operation(
    op.READ_FILESPACE,
    "Read a file of a filespace",
    {"description": "The bytes of the file", "content": _BYTES},
    404,
    409,
    503,
)
async def read_filespace(context_id: Context, path: FilePath, plane: Plane, caller: Who) -> Response:
    """The raw bytes of the last write."""
    parts = plane.filespaces.read(caller, context_id, path)
    size = await anext(parts)
    headers = {"content-length": str(size)}
    return ClosingStream(cast(AsyncIterator[bytes], parts), media_type="application/octet-stream", headers=headers)


@router.operation(
    op.WRITE_FILESPACE,
    "Write a file of a filespace",
    FilespaceFile,
    404,
    409,
    413,
    429,
    503,
    openapi_extra={"requestBody": {"required": True, "content": _BYTES}},
)
async def write_filespace(
    context_id: Context,
    path: FilePath,
    plane: Plane,
    caller: Who,
    request: Request,
    *,
    mode: Annotated[str, Query(pattern="^[0-7]{3}$", description="octal permissions")] = "644",
) -> Response:
    """The raw body, of any size, becomes the file, atomically. Workspaces get it with their next pull."""
    made = await plane.filespaces.write(caller, context_id, path, streamed_body(request), mode=int(mode, 8))
    return as_json(made)


@router.operation(op.DELETE_FILESPACE, "Delete a file of a filespace", None, 404, 409)
async def delete_filespace(context_id: Context, path: FilePath, plane: Plane, caller: Who) -> Response:
    """Workspaces that did not change the file delete it with their next pull."""
    await plane.filespaces.delete(caller, context_id, path)
    return Response(status_code=204)


@router.operation(op.FORGET_FILESPACE, "Delete a whole filespace", None, 404, 409, 503)
async def forget_filespace(context_id: Context, plane: Plane, caller: Who) -> Response:
    """Every file in it, for good. The workspace keeps its files."""
    await plane.filespaces.forget(caller, context_id)
    return Response(status_code=204)
