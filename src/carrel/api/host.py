"""The host and the server: capabilities, disk use, health."""

from __future__ import annotations

from typing import Annotated

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from carrel.api.guard import GuardedRouter
from carrel.api.parameters import Path
from carrel.api.parts import Plane, Who, as_json, plane_of
from carrel.models import Answer, DiskUsage, HostReport, NodeList
from carrel.models.operations import GET_DISK_USAGE, GET_HOST, HEALTHZ, LIST_NODES, READMIT_NODE, READYZ, REVOKE_NODE

router = GuardedRouter(tags=["host"])

NodeName = Annotated[str, Path(alias="node", max_length=128, description="the name of a server")]


class Status(Answer):
    """The health of the server."""

    status: str


@router.operation(GET_HOST, "Capabilities of this host", HostReport)
async def get_host(plane: Plane) -> Response:
    """The report of `carrel doctor`."""
    return as_json(await plane.host_report())


@router.operation(GET_DISK_USAGE, "Disk use", DiskUsage)
async def get_disk_usage(plane: Plane) -> Response:
    """Of this server: workspaces, snapshots, the archive, environments, packages and records. Figures are up to half a
    minute old where measuring takes long. Needs a token that reaches every context.
    """
    return as_json(await plane.disk.usage())


@router.operation(LIST_NODES, "The servers on the database", NodeList)
async def list_nodes(plane: Plane) -> Response:
    """By name. A server that is silent is listed as `gone` for a day. Needs a token that reaches every context."""
    return as_json(NodeList(items=await plane.nodes.page()))


@router.operation(REVOKE_NODE, "Revoke the SPIFFE ID of a server", NodeList, 404, 422)
async def revoke_node(node: NodeName, plane: Plane, caller: Who) -> Response:
    """No server sends it requests or takes any from it, within seconds, and it ends when it learns of it. Its sessions
    are taken over by the others. It still has the key of the secrets and the password of the database: change both.
    """
    async with plane.operations.admit(caller, REVOKE_NODE, {"name": node}):
        await plane.nodes.revoke(node)
    return as_json(NodeList(items=await plane.nodes.page()))


@router.operation(READMIT_NODE, "Undo the revocation of a server", NodeList, 404, 422)
async def readmit_node(node: NodeName, plane: Plane, caller: Who) -> Response:
    """It may be started again under its name."""
    async with plane.operations.admit(caller, READMIT_NODE, {"name": node}):
        await plane.nodes.readmit(node)
    return as_json(NodeList(items=await plane.nodes.page()))


@router.operation(HEALTHZ, "Whether the server runs", Status, needs_token=False)
async def healthz(request: Request) -> Response:
    """Needs no token."""
    return JSONResponse({"status": "ok"})


@router.operation(READYZ, "Whether the server can start sandboxes", Status, 503, needs_token=False)
async def readyz(request: Request) -> Response:
    """Needs no token."""
    await plane_of(request).ready()
    return JSONResponse({"status": "ok"})
