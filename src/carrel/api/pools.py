"""Pools of warm sandboxes: list them, and change their sizes."""

from __future__ import annotations

from typing import Annotated

from starlette.responses import Response

from carrel.api.guard import GuardedRouter
from carrel.api.parameters import Path
from carrel.api.parts import Plane, Who, as_json
from carrel.models import TemplateName
from carrel.models.operations import LIST_POOLS, RESIZE_POOL
from carrel.models.pools import PoolList, PoolResize

router = GuardedRouter(tags=["pools"])

Name = Annotated[TemplateName, Path(alias="pool", description="the name of a provider or a template")]


@router.operation(LIST_POOLS, "The pools of warm sandboxes", PoolList)
async def list_pools(plane: Plane) -> Response:
    """A pool exists from the first sandbox of its kind on, and as long as such sandboxes are asked for."""
    return as_json(plane.pools.list())


@router.operation(RESIZE_POOL, "Change the size of pools", PoolList, 404, 413, 422)
async def resize_pool(pool: Name, body: PoolResize, plane: Plane, caller: Who) -> Response:
    """Of all pools of a provider, or of a template, also those that become known later. Holds until the server ends.
    The answer has the pools that exist now.
    """
    return as_json(await plane.pools.resize(caller, pool, body))
