"""Contexts: deletion of a context with all its data."""

from __future__ import annotations

from starlette.responses import Response

from carrel.api.guard import GuardedRouter
from carrel.api.parts import Context, Plane, Who
from carrel.models.operations import FORGET_CONTEXT

router = GuardedRouter(tags=["contexts"])


@router.operation(FORGET_CONTEXT, "Forget a context", None, 404, 409, 502)
async def forget_context(context_id: Context, plane: Plane, caller: Who) -> Response:
    """Ends its session and deletes all its data: files, snapshots, filespace, secrets, MCP servers, template and
    policy. Only the audit log stays.
    """
    await plane.context_deletion.forget(caller, context_id)
    return Response(status_code=204)
