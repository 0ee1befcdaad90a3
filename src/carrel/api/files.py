"""Files of a workspace: streams of any size both ways, and what can be done with paths."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, cast

from fastapi import Depends, Query, Request
from starlette.responses import Response

from carrel.api.guard import Router
from carrel.api.parts import FilePath, Plane, SandboxId, Stream, as_json, known_query, raw_query, streamed_body
from carrel.api.problems import problems
from carrel.control.workspaces.bundles import Incoming
from carrel.models import (
    EditRequest,
    EditResult,
    FileInfo,
    FileList,
    FilesRequest,
    FilesWritten,
    MkdirRequest,
    MoveRequest,
)
from carrel.models.bundles import END, MEDIA_TYPE
from carrel.models.operations import (
    DELETE_FILE,
    EDIT_FILE,
    LIST_FILES,
    MAKE_DIRECTORY,
    MOVE_FILE,
    READ_FILE,
    READ_FILES,
    STAT_FILE,
    WRITE_FILE,
    WRITE_FILES,
)

router = Router(prefix="/v1/sandboxes/{id}/files", tags=["files"], dependencies=[Depends(known_query)])

_BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
BUNDLE = {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}


@router.operation(
    READ_FILE,
    summary="Read a file",
    responses={
        200: {"description": "The bytes of the file", "content": _BYTES},
        **problems(404, 409, 502),
    },
)
async def read_file(
    id: SandboxId,
    path: FilePath,
    plane: Plane,
    offset: Annotated[int, Query(ge=0, le=10**15)] = 0,
    length: Annotated[int | None, Query(ge=0, le=10**15)] = None,
) -> Response:
    """The raw bytes, from `offset` on and at most `length` of them."""
    parts = plane.operations.read_file(id, path, offset=offset, length=length)
    size = await anext(parts)
    headers = {} if size is None else {"content-length": str(size)}
    content = cast(AsyncIterator[bytes], parts)
    return Stream(content, media_type="application/octet-stream", headers=headers)


@router.operation(
    WRITE_FILE,
    summary="Write a file",
    responses={200: {"model": FileInfo}, **problems(404, 409, 429, 502)},
    openapi_extra={"requestBody": {"required": True, "content": _BYTES}},
)
async def write_file(
    id: SandboxId,
    path: FilePath,
    plane: Plane,
    request: Request,
    *,
    mode: Annotated[str | None, Query(pattern="^[0-7]{3,4}$", description="octal permissions")] = None,
    parents: Annotated[bool, Query(description="make missing directories")] = True,
    exclusive: Annotated[bool, Query(description="fail when something is there")] = False,
) -> Response:
    """The raw body, of any size, becomes the file: whole or not at all."""
    return as_json(
        await plane.operations.write_file(
            id, path, streamed_body(request), mode=mode, parents=parents, exclusive=exclusive
        )
    )


@router.operation(
    WRITE_FILES,
    summary="Write many files",
    responses={200: {"model": FilesWritten}, **problems(404, 409, 413, 429, 502)},
    openapi_extra={"requestBody": {"required": True, "content": BUNDLE}},
)
async def write_files(id: SandboxId, plane: Plane, request: Request) -> Response:
    """A bundle, of any size. Each file is written whole or not at all; when one cannot be, those before it are."""
    return as_json(await plane.bundles.write(id, Incoming(streamed_body(request))))


@router.operation(
    READ_FILES,
    summary="Read many files",
    responses={200: {"description": "A bundle of the files", "content": BUNDLE}, **problems(404, 409, 413, 502)},
)
async def read_files(id: SandboxId, body: FilesRequest, plane: Plane) -> Response:
    """In the order they were named. In the place of one that cannot be read comes why."""
    await plane.sessions.find(id)
    return Stream(_ended(plane.bundles.read(id, body.paths)), media_type=MEDIA_TYPE)


async def _ended(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async with aclosing(parts):  # type: ignore[type-var]
        async for part in parts:
            yield part
    yield END


@router.operation(
    STAT_FILE,
    summary="What is at a path",
    responses={200: {"model": FileInfo}, **problems(404, 409, 502)},
)
async def stat_file(id: SandboxId, path: FilePath, plane: Plane) -> Response:
    """A symlink is shown itself."""
    return as_json(await plane.operations.stat_file(id, path))


@router.operation(
    LIST_FILES,
    summary="List a directory",
    responses={200: {"model": FileList}, **problems(404, 409, 502)},
)
async def list_files(
    id: SandboxId,
    plane: Plane,
    request: Request,
    *,
    path: Annotated[str, Query(min_length=1, max_length=4096, description="relative to the workspace")] = ".",
    recursive: bool = False,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> Response:
    """Entries, at most `limit`."""
    raw = raw_query(request, "path") or path
    return as_json(await plane.operations.list_files(id, raw, recursive=recursive, limit=limit))


@router.operation(
    EDIT_FILE,
    summary="Replace text in a file",
    responses={200: {"model": EditResult}, **problems(404, 409, 413, 429, 502)},
)
async def edit_file(id: SandboxId, body: EditRequest, plane: Plane) -> Response:
    """Fails unless the old text is there exactly once, or `replace_all`."""
    return as_json(await plane.operations.edit_file(id, body))


@router.operation(
    MOVE_FILE,
    summary="Move or rename",
    responses={200: {"model": FileInfo}, **problems(404, 409, 413, 502)},
)
async def move_file(id: SandboxId, body: MoveRequest, plane: Plane) -> Response:
    """Inside the workspace."""
    return as_json(await plane.operations.move_file(id, body))


@router.operation(
    MAKE_DIRECTORY,
    summary="Make a directory",
    responses={200: {"model": FileInfo}, **problems(404, 409, 413, 429, 502)},
)
async def make_directory(id: SandboxId, body: MkdirRequest, plane: Plane) -> Response:
    """And its parents."""
    return as_json(await plane.operations.make_directory(id, body))


@router.operation(
    DELETE_FILE,
    summary="Delete a file or a tree",
    status_code=204,
    responses=problems(404, 409, 502),
)
async def delete_file(id: SandboxId, path: FilePath, plane: Plane, recursive: bool = False) -> Response:
    """A directory that is not empty needs `recursive`."""
    await plane.operations.delete_file(id, path, recursive=recursive)
    return Response(status_code=204)
