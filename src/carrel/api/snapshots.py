"""Snapshots of a workspace: take, list, restore, fork, compare, download."""

from __future__ import annotations

from typing import Annotated

from starlette.responses import Response

from carrel.api.guard import GuardedRouter, require
from carrel.api.parameters import Path, Query
from carrel.api.parts import ClosingStream, Plane, SandboxId, Who, as_json
from carrel.models import FileChanges, ForkRequest, RestoreRequest, SandboxInfo, SnapshotInfo, SnapshotPage
from carrel.models import operations as op

router = GuardedRouter(tags=["snapshots"])

SnapshotId = Annotated[str, Path(min_length=1, max_length=64)]


@router.operation(op.TAKE_SNAPSHOT, "Take a snapshot", SnapshotInfo, 404, 409, 429, status=201)
async def take_snapshot(id: SandboxId, plane: Plane, caller: Who) -> Response:
    """An immutable copy of the workspace; it takes the space of what changed since the last one."""
    return as_json(await plane.snapshots.take(caller, id), 201)


@router.operation(op.LIST_SNAPSHOTS, "List snapshots", SnapshotPage, 404, 409)
async def list_snapshots(
    id: SandboxId,
    plane: Plane,
    caller: Who,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(max_length=512, description="`next` of the page before")] = None,
) -> Response:
    """Newest first."""
    return as_json(await plane.snapshots.page(caller, id, limit=limit, cursor=cursor))


@router.operation(op.DELETE_SNAPSHOT, "Delete a snapshot", None, 404, 409)
async def delete_snapshot(id: SandboxId, snapshot_id: SnapshotId, plane: Plane, caller: Who) -> Response:
    """For good. Other snapshots stay complete."""
    await plane.snapshots.delete(caller, id, snapshot_id)
    return Response(status_code=204)


@router.operation(
    op.EXPORT,
    "Download a snapshot",
    {"content": {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}},
    404,
    409,
)
async def download_snapshot(id: SandboxId, snapshot_id: SnapshotId, plane: Plane, caller: Who) -> Response:
    """The files as a tar archive."""
    chunks = await plane.snapshots.export(caller, id, snapshot_id)
    return ClosingStream(chunks, media_type="application/x-tar")


@router.operation(op.DIFF_SNAPSHOTS, "Compare two snapshots", FileChanges, 404, 409)
async def diff_snapshots(
    id: SandboxId,
    plane: Plane,
    caller: Who,
    before: Annotated[str, Query(min_length=1, max_length=64)],
    after: Annotated[str, Query(min_length=1, max_length=64)],
) -> Response:
    """Paths that were added, removed or changed."""
    return as_json(await plane.snapshots.diff(caller, id, before, after))


@router.operation(op.RESTORE, "Restore a snapshot", SandboxInfo, 404, 409, 413)
async def restore(id: SandboxId, body: RestoreRequest, plane: Plane, caller: Who) -> Response:
    """Replaces the files of the workspace. A running sandbox is stopped and started again."""
    return as_json(await plane.snapshots.restore(caller, id, body.snapshot_id))


@router.operation(op.FORK, "Fork a workspace", SandboxInfo, 404, 409, 413, 429, 503, status=201)
async def fork(id: SandboxId, body: ForkRequest, plane: Plane, caller: Who) -> Response:
    """A new context with the same files, settings and secrets, started at once."""
    require(caller, op.FORK, body.context_id)
    return as_json(await plane.snapshots.fork(caller, id, body.context_id, body.snapshot_id, secrets=body.secrets), 201)
