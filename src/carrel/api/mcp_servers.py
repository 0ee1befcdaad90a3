"""MCP servers of a context: declared, started and stopped at run time, called by REST, and each at a URL of its own for
MCP clients.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query, Request
from starlette.responses import Response

from carrel.api.guard import Router
from carrel.api.parts import SSE, Plane, SandboxId, as_json, body_of, known_query, plane_of
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
from carrel.models.operations import (
    ADD_MCP_SERVER,
    CONNECT_MCP_SERVER,
    ENABLE_MCP_SERVER,
    GET_MCP_CATALOGUE,
    GET_MCP_LOG,
    GET_MCP_SERVER,
    LIST_MCP_SERVERS,
    MCP_REQUEST,
    REFRESH_MCP_SERVER,
    REMOVE_MCP_SERVER,
    STOP_MCP_SERVER,
)

router = Router(prefix="/v1/sandboxes/{id}/mcp-servers", tags=["mcp"])
Name = Annotated[McpServerName, Path(alias="server", description="name of an MCP server")]
CALL_MODEL = McpRequest
_MESSAGE = {"schema": {"type": "object", "description": "a message of MCP"}}


@router.operation(LIST_MCP_SERVERS, "The MCP servers of a context", McpServerList, 404, 409, 502)
async def list_mcp_servers(id: SandboxId, plane: Plane) -> Response:
    """By name, with those the operator runs for all, and with what their processes do now. Starts nothing."""
    return as_json(await plane.mcp.list(id))


@router.operation(ADD_MCP_SERVER, "Add or replace an MCP server", McpServerInfo, 404, 409, 413, 422, 429, 502, 503)
async def add_mcp_server(id: SandboxId, server: Name, body: McpServerRequest, plane: Plane) -> Response:
    """What it needs is installed, and it is asked what it offers, in a sandbox that lasts for that long. Why it could
    not be asked is in `discovery_error`.
    """
    return as_json(await plane.mcp.add(id, server, body))


@router.operation(GET_MCP_SERVER, "One MCP server", McpServerInfo, 404, 409, 502)
async def get_mcp_server(id: SandboxId, server: Name, plane: Plane) -> Response:
    """How it is declared, and what its process does now."""
    return as_json(await plane.mcp.get(id, server))


@router.operation(REMOVE_MCP_SERVER, "Remove an MCP server", None, 404, 409, 502)
async def remove_mcp_server(id: SandboxId, server: Name, plane: Plane) -> Response:
    """Its process is ended with all it started."""
    await plane.mcp.remove(id, server)
    return Response(status_code=204)


@router.operation(ENABLE_MCP_SERVER, "Start an MCP server", McpServerInfo, 404, 409, 413, 422, 429, 502, 503)
async def start_mcp_server(id: SandboxId, server: Name, plane: Plane) -> Response:
    """Now, and from now on again whenever it is called. A sandbox that is stopped is resumed."""
    return as_json(await plane.mcp.start(id, server))


@router.operation(STOP_MCP_SERVER, "Stop an MCP server", McpServerInfo, 404, 409, 502)
async def stop_mcp_server(id: SandboxId, server: Name, plane: Plane) -> Response:
    """Its process is ended, and calls are refused until it is started again."""
    return as_json(await plane.mcp.stop(id, server))


@router.operation(GET_MCP_LOG, "What an MCP server wrote to its standard error", McpLog, 404, 409, 502)
async def get_mcp_log(
    id: SandboxId,
    server: Name,
    plane: Plane,
    *,
    offset: Annotated[int, Query(ge=0, le=10**15)] = 0,
    limit: Annotated[int, Query(ge=1, le=256 * 1024)] = 64 * 1024,
) -> Response:
    """The newest 256 KB are kept while the sandbox lives."""
    return as_json(await plane.mcp.log(id, server, offset=offset, limit=limit))


@router.operation(GET_MCP_CATALOGUE, "What an MCP server offers", McpCatalogue, 404, 409, 502)
async def get_mcp_catalogue(id: SandboxId, server: Name, plane: Plane) -> Response:
    """As it is known: tools, prompts, resources. Nothing is started for it."""
    return as_json(await plane.mcp.catalogue(id, server))


@router.operation(
    REFRESH_MCP_SERVER, "Ask an MCP server what it offers now", McpCatalogue, 404, 409, 413, 422, 429, 502, 503
)
async def refresh_mcp_server(id: SandboxId, server: Name, plane: Plane) -> Response:
    """In a sandbox that lasts for that long, with a copy of the workspace. Why it could not be asked is in `error`."""
    return as_json(await plane.mcp.refresh(id, server))


@router.operation(
    MCP_REQUEST, "Call a tool of an MCP server", McpResult, 404, 409, 413, 422, 429, 502, 503, parses=McpRequest
)
async def mcp_request(request: Request) -> Response:
    """Starts the server, and resumes the sandbox, if need be. What the tool complains of is a result."""
    wanted, names = await body_of(request, McpRequest), request.path_params
    return as_json(await plane_of(request).mcp.request(names["id"], names["server"], wanted))


@router.operation(
    CONNECT_MCP_SERVER,
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
        202: {"description": "a notification was taken"},
        406: {"description": "the client does not take what an MCP client must take"},
    },
    parses=McpRequest,
    openapi_extra={"requestBody": {"content": {"application/json": _MESSAGE}}},
)
async def connect_mcp_server(request: Request) -> Response:
    """Streamable HTTP, without sessions. Lists are answered from the catalogue; calls pass policy as `mcp_request`
    does.
    """
    from carrel.api.mcp_endpoint import McpResponse

    known_query(request)
    names, plane = request.path_params, plane_of(request)
    offered = await plane.mcp.offered(names["id"], names["server"])
    return McpResponse(plane, names["id"], offered)
