"""Environments: build, list, get, remove; attach to a sandbox."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated

from starlette.responses import Response

from carrel.api import following
from carrel.api.guard import GuardedRouter
from carrel.api.parameters import Path, Query
from carrel.api.parts import Plane, SandboxId, Who, as_json
from carrel.models import (
    EnvironmentAttach,
    EnvironmentBuild,
    EnvironmentEvent,
    EnvironmentInfo,
    EnvironmentList,
    EnvironmentName,
)
from carrel.models import operations as op

router = GuardedRouter(tags=["environments"])

Name = Annotated[EnvironmentName, Path(alias="env", description="the name of an environment, or a label")]
Follow = Annotated[bool, Query(description="stream the progress, a JSON object per line; the last has the environment")]
_ANSWER = following.followed_answer(EnvironmentInfo, EnvironmentEvent)


@router.operation(op.LIST_ENVS, "The environments of the server", EnvironmentList)
async def list_envs(plane: Plane, caller: Who) -> Response:
    """The last used first. A token that does not reach every context sees the environments of its contexts, and those
    with a label, by their label.
    """
    return as_json(await plane.packages.environments(caller))


@router.operation(op.BUILD_ENV, "Build an environment", _ANSWER, 404, 409, 413, 422, 429, 502)
async def build_env(body: EnvironmentBuild, plane: Plane, caller: Who, follow: Follow = False) -> Response:
    """Under the policy of the server. An existing one is not built again; `name` is a label for it."""
    return await _answered(lambda say: plane.envs.build(caller, body, say=say), follow=follow)


@router.operation(op.GET_ENV, "One environment", EnvironmentInfo, 404)
async def get_env(env: Name, plane: Plane, caller: Who) -> Response:
    """By its name or a label."""
    return as_json(plane.environments.info(caller, plane.environments.find(caller, env)))


@router.operation(op.DELETE_ENV, "Remove an environment", None, 404, 409)
async def delete_env(env: Name, plane: Plane, caller: Who) -> Response:
    """With its labels. Fails with 409 while a session holds it."""
    async with plane.operations.admit(caller, op.DELETE_ENV, {"env": env}):
        await plane.environments.remove(caller, env)
    return Response(status_code=204)


@router.operation(op.ATTACH_ENV, "Attach an environment to a sandbox", _ANSWER, 404, 409, 413, 422, 429, 502)
async def attach_env(
    id: SandboxId, body: EnvironmentAttach, plane: Plane, caller: Who, follow: Follow = False
) -> Response:
    """By name or by requirements, built under the policy of the context if there is none yet. It is at `path` in the
    sandbox at once, until the session ends.
    """
    return await _answered(lambda say: plane.envs.attach(caller, id, body, say=say), follow=follow)


@router.operation(op.LIST_SANDBOX_ENVS, "The environments a sandbox has", EnvironmentList, 404, 409)
async def list_sandbox_envs(id: SandboxId, plane: Plane, caller: Who) -> Response:
    """By name."""
    return as_json(await plane.envs.list(caller, id))


@router.operation(op.DETACH_ENV, "Detach an environment", None, 404, 409)
async def detach_env(id: SandboxId, env: Name, plane: Plane, caller: Who) -> Response:
    """It may then be removed if no other session holds it."""
    await plane.envs.detach(caller, id, env)
    return Response(status_code=204)


async def _answered(
    work: Callable[[Callable[[str], None] | None], Awaitable[EnvironmentInfo]], *, follow: bool
) -> Response:
    return following.follow(work, EnvironmentEvent) if follow else as_json(await work(None))
