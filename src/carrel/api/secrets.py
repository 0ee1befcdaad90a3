"""The secrets of a context: put, list by name, delete. No route returns a value."""

from __future__ import annotations

from typing import Annotated

from starlette.requests import Request
from starlette.responses import Response

from carrel.api.guard import GuardedRouter
from carrel.api.parameters import Path
from carrel.api.parts import Context, Plane, Who, as_json, caller_of, context_of, json_of, plane_of
from carrel.models import SecretList, SecretName, SecretValue
from carrel.models.operations import DELETE_SECRET, LIST_SECRETS, PUT_SECRET

router = GuardedRouter(tags=["secrets"])

Name = Annotated[str, Path(min_length=1, max_length=128)]


@router.operation(LIST_SECRETS, "The secrets of a context", SecretList)
async def list_secrets(context_id: Context, plane: Plane) -> Response:
    """Names and versions, never values."""
    return as_json(await plane.secrets.list(context_id))


@router.operation(PUT_SECRET, "Store a secret", SecretName, 413, 422, 429, 502, parses=SecretValue)
async def put_secret(request: Request) -> Response:
    """It is the file `/run/secrets/NAME` in the sandbox of the context; a running one gets it at once."""
    context_id, name, body = context_of(request), request.path_params["name"], await json_of(request, SecretValue)
    plane = plane_of(request)
    async with plane.operations.admit(caller_of(request), PUT_SECRET, {"name": name}, context_id=context_id):
        return as_json(await plane.secrets.put(context_id, name, body.bytes()))


@router.operation(DELETE_SECRET, "Delete a secret", None, 404, 502)
async def delete_secret(context_id: Context, name: Name, plane: Plane, caller: Who) -> Response:
    """A running sandbox loses it at once."""
    async with plane.operations.admit(caller, DELETE_SECRET, {"name": name}, context_id=context_id):
        await plane.secrets.delete(context_id, name)
    return Response(status_code=204)
