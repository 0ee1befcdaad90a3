"""The host and the server itself: what they can do, and whether they are well."""

from __future__ import annotations

from fastapi import Depends
from starlette.responses import JSONResponse, Response

from carrel.api.guard import Router
from carrel.api.parts import Plane, as_json, known_query
from carrel.api.problems import problems
from carrel.models import Answer, DiskUsage, HostReport

router = Router(tags=["host"])


class Status(Answer):
    """That the server is well."""

    status: str


@router.get(
    "/v1/host",
    operation_id="get_host",
    summary="What this host can do",
    response_model=None,
    dependencies=[Depends(known_query)],
    responses={200: {"model": HostReport}, **problems()},
)
async def get_host(plane: Plane) -> Response:
    """What `carrel doctor` shows."""
    return as_json(await plane.host_report())


@router.get(
    "/v1/disk",
    operation_id="get_disk_usage",
    summary="What fills the disk",
    response_model=None,
    dependencies=[Depends(known_query)],
    responses={200: {"model": DiskUsage}, **problems()},
)
async def get_disk_usage(plane: Plane) -> Response:
    """Of this server: workspaces, snapshots, the archive, environments, packages and records. Up to half a minute old.
    Needs a token that reaches every context.
    """
    return as_json(await plane.disk.usage())


@router.get(
    "/healthz",
    operation_id="healthz",
    summary="Whether the server runs",
    response_model=None,
    responses={200: {"model": Status}},
    openapi_extra={"security": []},
)
async def healthz() -> Response:
    """Needs no token."""
    return JSONResponse({"status": "ok"})


@router.get(
    "/readyz",
    operation_id="readyz",
    summary="Whether the server can start sandboxes",
    response_model=None,
    responses={200: {"model": Status}, 503: problems(503)[503]},
    openapi_extra={"security": []},
)
async def readyz(plane: Plane) -> Response:
    """Needs no token."""
    await plane.ready()
    return JSONResponse({"status": "ok"})
