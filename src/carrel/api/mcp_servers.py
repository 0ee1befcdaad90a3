"""MCP servers of a context: declare, start, stop and call them; each has a URL for MCP clients."""

from __future__ import annotations

from typing import Annotated

from starlette.requests import Request
from starlette.responses import Response

from carrel.api.guard import GuardedRouter
from carrel.api.parameters import Path, Query
from carrel.api.parts import SSE, Plane, SandboxId, Who, as_json, body_of, caller_of, known_query, plane_of
from carrel.models import (
    McpCatalogue,
    McpLog,
    McpRequest,
    McpResult,
    McpServerInfo,
    McpServerList,
    McpServerName,
    McpServerRequest,
)
from carrel.models import operations as op

router = GuardedRouter(tags=["mcp"])
Name = Annotated[McpServerName, Path(alias="server", description="name of an MCP server")]
CALL_MODEL = McpRequest
_MESSAGE = {"schema": {"type": "object", "description": "a message of MCP"}}


@router.operation(op.LIST_MCP_SERVERS, "The MCP servers of a context", McpServerList, 404, 409, 502)
async def list_mcp_servers(id: SandboxId, plane: Plane, caller: Who) -> Response:
    """By name, with the servers of the operator and the state of their processes. Starts nothing."""
    return as_json(await plane.mcp.list(caller, id))


@router.operation(op.ADD_MCP_SERVER, "Add or replace an MCP server", McpServerInfo, 404, 409, 413, 422, 429, 502, 503)
async def add_mcp_server(id: SandboxId, server: Name, body: McpServerRequest, plane: Plane, caller: Who) -> Response:
    """Installs its packages, and asks it for its catalogue in a temporary sandbox. `discovery_error` says why that
    failed.
    """
    return as_json(await plane.mcp.add(caller, id, server, body))


@router.operation(op.GET_MCP_SERVER, "One MCP server", McpServerInfo, 404, 409, 502)
async def get_mcp_server(id: SandboxId, server: Name, plane: Plane, caller: Who) -> Response:
    """Its declaration and the state of its process."""
    return as_json(await plane.mcp.get(caller, id, server))


@router.operation(op.REMOVE_MCP_SERVER, "Remove an MCP server", None, 404, 409, 502)
async def remove_mcp_server(id: SandboxId, server: Name, plane: Plane, caller: Who) -> Response:
    """Ends its process and all child processes."""
    await plane.mcp.remove(caller, id, server)
    return Response(status_code=204)


@router.operation(op.ENABLE_MCP_SERVER, "Start an MCP server", McpServerInfo, 404, 409, 413, 422, 429, 502, 503)
async def start_mcp_server(id: SandboxId, server: Name, plane: Plane, caller: Who) -> Response:
    """Now, and from now on whenever it is called. Resumes a stopped sandbox."""
    return as_json(await plane.mcp.start(caller, id, server))


@router.operation(op.STOP_MCP_SERVER, "Stop an MCP server", McpServerInfo, 404, 409, 502)
async def stop_mcp_server(id: SandboxId, server: Name, plane: Plane, caller: Who) -> Response:
    """Ends its process and refuses calls until it is started again."""
    return as_json(await plane.mcp.stop(caller, id, server))


@router.operation(op.GET_MCP_LOG, "The log of an MCP server", McpLog, 404, 409, 502)
async def get_mcp_log(
    id: SandboxId,
    server: Name,
    plane: Plane,
    caller: Who,
    *,
    offset: Annotated[int, Query(ge=0, le=10**15)] = 0,
    limit: Annotated[int, Query(ge=1, le=256 * 1024)] = 64 * 1024,
) -> Response:
    """Its standard error: the newest 256 KB, while the sandbox runs."""
    return as_json(await plane.mcp.log(caller, id, server, offset=offset, limit=limit))


@router.operation(op.GET_MCP_CATALOGUE, "The catalogue of an MCP server", McpCatalogue, 404, 409, 502)
async def get_mcp_catalogue(id: SandboxId, server: Name, plane: Plane, caller: Who) -> Response:
    """The stored tools, prompts and resources. Starts nothing."""
    return as_json(await plane.mcp.catalogue(caller, id, server))


@router.operation(
    op.REFRESH_MCP_SERVER, "Refresh the catalogue of an MCP server", McpCatalogue, 404, 409, 413, 422, 429, 502, 503
)
async def refresh_mcp_server(id: SandboxId, server: Name, plane: Plane, caller: Who) -> Response:
    """Asks the server in a temporary sandbox with a copy of the workspace. `error` says why that failed."""
    return as_json(await plane.mcp.refresh(caller, id, server))


@router.operation(
    op.MCP_REQUEST, "Call a tool of an MCP server", McpResult, 404, 409, 413, 422, 429, 502, 503, parses=McpRequest
)
async def mcp_request(request: Request) -> Response:
    """Starts the server and resumes the sandbox if necessary. An error of the tool is a result."""
    wanted, names = await body_of(request, McpRequest), request.path_params
    return as_json(await plane_of(request).mcp.request(caller_of(request), names["id"], names["server"], wanted))


@router.operation(
    op.CONNECT_MCP_SERVER,
    "The URL of an MCP server for MCP clients",
    {"description": "an answer", "content": {"application/json": _MESSAGE, SSE: _MESSAGE}},
    404,
    409,
    413,
    422,
    429,
    502,
    503,
    responses={
        202: {"description": "a notification was accepted"},
        406: {"description": "the client does not accept the content types that MCP requires"},
    },
    parses=McpRequest,
    openapi_extra={"requestBody": {"content": {"application/json": _MESSAGE}}},
)
async def connect_mcp_server(request: Request) -> Response:
    """Streamable HTTP, without sessions. Lists come from the catalogue; policy decides calls as for `mcp_request`."""
    from carrel.api.mcp_endpoint import McpResponse

    known_query(request)
    names, plane = request.path_params, plane_of(request)
    offered = await plane.mcp.offered(names["id"], names["server"])
    return McpResponse(plane, caller_of(request), names["id"], offered)
