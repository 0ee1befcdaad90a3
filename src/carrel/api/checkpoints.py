"""Checkpoints of a folder workspace: take, list, compare, undo."""

from __future__ import annotations

from typing import Annotated

from starlette.requests import Request
from starlette.responses import Response

from carrel.api.guard import GuardedRouter
from carrel.api.parameters import Path, Query
from carrel.api.parts import Context, Plane, Who, as_json, raw_query
from carrel.models import (
    CheckpointInfo,
    CheckpointList,
    CheckpointRequest,
    FolderChanges,
    FolderPatch,
    UndoRequest,
    UndoResult,
)
from carrel.models import operations as op
from carrel.models.base import MAX_PATH

router = GuardedRouter(tags=["checkpoints"])

CheckpointId = Annotated[str, Path(min_length=1, max_length=64)]
After = Annotated[
    str | None, Query(min_length=1, max_length=64, description="a later checkpoint; by default the folder now")
]


@router.operation(op.LIST_CHECKPOINTS, "List checkpoints", CheckpointList, 404)
async def list_checkpoints(context_id: Context, plane: Plane, caller: Who) -> Response:
    """Newest first. Empty for a context that never worked on a folder."""
    return as_json(await plane.checkpoints.list(caller, context_id))


@router.operation(op.TAKE_CHECKPOINT, "Take a checkpoint", CheckpointInfo, 404, 409, 413, 422, 429, status=201)
async def take_checkpoint(context_id: Context, body: CheckpointRequest, plane: Plane, caller: Who) -> Response:
    """Records the folder of the context as it is now. Only files that changed since the last checkpoint are read."""
    return as_json(await plane.checkpoints.take(caller, context_id, body.reason), 201)


@router.operation(op.COMPARE_CHECKPOINTS, "Compare a checkpoint", FolderChanges, 404, 409)
async def compare_checkpoints(
    context_id: Context, checkpoint_id: CheckpointId, plane: Plane, caller: Who, after: After = None
) -> Response:
    """Entries that were added, removed or changed since, at most 10,000."""
    return as_json(await plane.checkpoints.changes(caller, context_id, checkpoint_id, after))


@router.operation(op.PATCH_CHECKPOINTS, "Compare text files line by line", FolderPatch, 404, 409)
async def patch_checkpoints(
    context_id: Context,
    checkpoint_id: CheckpointId,
    plane: Plane,
    caller: Who,
    request: Request,
    *,
    after: After = None,
    path: Annotated[
        str | None, Query(min_length=1, max_length=MAX_PATH, description="only this file or folder")
    ] = None,
) -> Response:
    """A unified diff. Binary and large files are only named."""
    wanted = raw_query(request, "path") if path is not None else None
    return as_json(await plane.checkpoints.patch(caller, context_id, checkpoint_id, after, wanted))


@router.operation(op.UNDO_CHECKPOINT, "Undo the changes of a run", UndoResult, 404, 409, 413, 429)
async def undo_checkpoint(
    context_id: Context, checkpoint_id: CheckpointId, body: UndoRequest, plane: Plane, caller: Who
) -> Response:
    """Gives each entry that changed between this checkpoint and the end of its run the state of this checkpoint.
    Without an end, all changes until now are undone. Entries that changed again after the end are left and listed.
    """
    return as_json(await plane.checkpoints.undo(caller, context_id, checkpoint_id, body.paths, dry_run=body.dry_run))
