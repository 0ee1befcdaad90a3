"""Sandboxes: get or create, list, stop, terminate."""

from __future__ import annotations

from typing import Annotated

from starlette.requests import Request
from starlette.responses import Response

from carrel.api.forwarding import PASS, target_of
from carrel.api.guard import GuardedRouter, require
from carrel.api.parameters import Query
from carrel.api.parts import Plane, SandboxId, Who, as_json, caller_of, json_of, plane_of
from carrel.api.worker_metrics import WorkerMetrics
from carrel.errors import InvalidRequest
from carrel.models import (
    SandboxInfo,
    SandboxPage,
    SandboxRequest,
    State,
    SupervisorHealth,
    TerminateRequest,
    WorkspaceUsage,
)
from carrel.models.operations import DEPLOY_OR_RESUME, GET_SANDBOX, GET_USAGE, HEALTH, LIST_SANDBOXES, STOP, TERMINATE

router = GuardedRouter(tags=["sandboxes"])

_IDEMPOTENCY_KEY = {
    "name": "idempotency-key",
    "in": "header",
    "required": False,
    "description": "the same key gives the same sandbox",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255},
}


@router.operation(
    DEPLOY_OR_RESUME,
    "Get or create a sandbox",
    {"model": SandboxInfo, "description": "It ran already"},
    409,
    413,
    422,
    429,
    503,
    responses={201: {"model": SandboxInfo, "description": "It was started"}},
    parses=SandboxRequest,
    openapi_extra={"parameters": [_IDEMPOTENCY_KEY]},
)
async def deploy_or_resume(request: Request) -> Response:
    """The running sandbox of a context, started on its workspace if necessary; without a context an ephemeral one."""
    wanted = await json_of(request, SandboxRequest)
    caller = caller_of(request)
    require(caller, DEPLOY_OR_RESUME, wanted.context_id)
    key = request.headers.get("idempotency-key")
    if key is not None and not 1 <= len(key) <= 255:
        raise InvalidRequest(
            "'idempotency-key' is not valid: it has 1 to 255 characters", field="idempotency-key", hint="see /docs"
        )
    info, started = await plane_of(request).operations.deploy_or_resume(caller, wanted, key)
    return as_json(info, 201 if started else 200)


@router.operation(LIST_SANDBOXES, "List sandboxes", SandboxPage)
async def list_sandboxes(
    request: Request,
    plane: Plane,
    caller: Who,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(max_length=512, description="`next` of the page before")] = None,
    state: Annotated[
        State | None, Query(description="only in this state; terminated ones are listed only with it")
    ] = None,
    context_id: Annotated[str | None, Query(max_length=128)] = None,
) -> Response:
    """Newest first, within the reach of the token: a page may be short or empty and still have a `next`."""
    states = None if state is None else [state]
    page = await plane.sessions.page(limit=limit, cursor=cursor, states=states, context_id=context_id)
    page.items = [info for info in page.items if caller.identity.reaches(info.context_id)]
    await plane.retention.mark_kept(page.items)
    await plane.resources.fill(page.items)
    others: WorkerMetrics | None = request.app.state.worker_metrics
    if others is not None and PASS not in request.scope:
        await others.fill(target_of(request.scope), page.items)
    return as_json(page)


@router.operation(GET_SANDBOX, "One sandbox", SandboxInfo, 404)
async def get_sandbox(request: Request) -> Response:
    """By its id or its context id."""
    plane = plane_of(request)
    info = await plane.sessions.get(request.path_params["id"])
    await plane.resources.fill([info])
    return as_json(info)


@router.operation(GET_USAGE, "Size of a workspace", WorkspaceUsage, 404, 409)
async def get_usage(id: SandboxId, plane: Plane) -> Response:
    """And its limit."""
    return as_json(await plane.sessions.usage(id))


@router.operation(STOP, "Stop a sandbox, keep its workspace", SandboxInfo, 404, 502)
async def stop(request: Request) -> Response:
    """Ends its processes. `deploy_or_resume` starts it again on the same files. An ephemeral one is terminated."""
    return as_json(await plane_of(request).operations.stop(caller_of(request), request.path_params["id"]))


@router.operation(TERMINATE, "End a session", SandboxInfo, 404, 413, 502)
async def terminate(id: SandboxId, plane: Plane, caller: Who, body: TerminateRequest | None = None) -> Response:
    """Ends the sandbox with everything in it. A durable workspace stays unless the request deletes it."""
    request = body or TerminateRequest()
    return as_json(await plane.operations.terminate(caller, id, request))


@router.operation(HEALTH, "Health of the supervisor", SupervisorHealth, 404, 409, 502)
async def get_sandbox_health(id: SandboxId, plane: Plane, caller: Who) -> Response:
    """The answer comes from inside the sandbox, so it cannot be trusted."""
    return as_json(await plane.operations.health(caller, id))
