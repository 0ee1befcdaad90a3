"""Files of a workspace: read and write streams of any size, and operations on paths."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any, cast

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from carrel.api.guard import GuardedRouter
from carrel.api.parameters import Body, Query
from carrel.api.parts import ClosingStream, FilePath, Plane, SandboxId, Who, as_json, raw_query, streamed_body
from carrel.control.workspaces.bundles import Incoming
from carrel.models import FileInfo, FilesRequest, FilesWritten
from carrel.models import operations as op
from carrel.models.bundles import END, MEDIA_TYPE
from carrel.models.files import Nothing
from carrel.models.operations import TABLE, ForwardedOperation

router = GuardedRouter(tags=["files"])

_BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
BUNDLE = {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}


@router.operation(
    op.READ_FILE, "Read a file", {"description": "The bytes of the file", "content": _BYTES}, 404, 409, 502
)
async def read_file(
    id: SandboxId,
    path: FilePath,
    plane: Plane,
    caller: Who,
    offset: Annotated[int, Query(ge=0, le=10**15)] = 0,
    length: Annotated[int | None, Query(ge=0, le=10**15)] = None,
) -> Response:
    """The raw bytes, from `offset` on and at most `length` of them."""
    parts = plane.operations.read_file(caller, id, path, offset=offset, length=length)
    size = await anext(parts)
    headers = {} if size is None else {"content-length": str(size)}
    content = cast(AsyncIterator[bytes], parts)
    return ClosingStream(content, media_type="application/octet-stream", headers=headers)


@router.operation(
    op.WRITE_FILE,
    "Write a file",
    FileInfo,
    404,
    409,
    429,
    502,
    openapi_extra={"requestBody": {"required": True, "content": _BYTES}},
)
async def write_file(
    id: SandboxId,
    path: FilePath,
    plane: Plane,
    caller: Who,
    request: Request,
    *,
    mode: Annotated[str | None, Query(pattern="^[0-7]{3,4}$", description="octal permissions")] = None,
    parents: Annotated[bool, Query(description="make missing directories")] = True,
    exclusive: Annotated[bool, Query(description="fail when the path exists")] = False,
) -> Response:
    """The raw body, of any size, becomes the file, atomically."""
    return as_json(
        await plane.operations.write_file(
            caller, id, path, streamed_body(request), mode=mode, parents=parents, exclusive=exclusive
        )
    )


@router.operation(
    op.WRITE_FILES,
    "Write many files",
    FilesWritten,
    404,
    409,
    413,
    429,
    502,
    openapi_extra={"requestBody": {"required": True, "content": BUNDLE}},
)
async def write_files(id: SandboxId, plane: Plane, caller: Who, request: Request) -> Response:
    """A bundle of any size. Each file is written atomically; when one fails, those before it stay written."""
    return as_json(await plane.bundles.write(caller, id, Incoming(streamed_body(request))))


@router.operation(
    op.READ_FILES, "Read many files", {"description": "A bundle of the files", "content": BUNDLE}, 404, 409, 413, 502
)
async def read_files(id: SandboxId, body: FilesRequest, plane: Plane, caller: Who) -> Response:
    """In the order of the request. For a file that cannot be read, the bundle has a problem."""
    await plane.sessions.find(id)
    return ClosingStream(_ended(plane.bundles.read(caller, id, body.paths)), media_type=MEDIA_TYPE)


async def _ended(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async with aclosing(parts):  # type: ignore[type-var]
        async for part in parts:
            yield part
    yield END


def add_route(router: GuardedRouter, operation: ForwardedOperation[Any, Any]) -> None:
    """Add the route of an operation that its row describes completely: the body, or the query, is the request."""
    where = Body() if operation.has_body else Query()
    empty = operation.result is Nothing
    statuses = [404, 409, *([413] if operation.has_body else []), *([429] if operation.fills_disk else []), 502]

    async def perform(id: SandboxId, wanted: BaseModel, plane: Plane, caller: Who, request: Request) -> Response:
        if not operation.has_body:  # the bytes of a path may not be UTF-8
            raw = {name: text for name in operation.paths if (text := raw_query(request, name))}
            wanted = wanted.model_copy(update=raw)
        result = await plane.operations.forward(caller, operation, id, wanted)
        return Response(status_code=204) if empty else as_json(result)

    perform.__annotations__["wanted"] = Annotated[operation.request, where]
    perform.__name__, perform.__doc__ = operation.id, operation.description
    router.operation(operation, operation.summary, None if empty else operation.result, *statuses)(perform)


for _operation in TABLE:
    if isinstance(_operation, ForwardedOperation):
        add_route(router, _operation)
