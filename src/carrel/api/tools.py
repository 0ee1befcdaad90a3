"""Tools by name, for agents that call tools."""

from __future__ import annotations

from starlette.responses import Response

from carrel.api.guard import GuardedRouter
from carrel.api.parts import Plane, SandboxId, Who, as_json
from carrel.models import ToolRequest, ToolResult
from carrel.models.operations import TOOL_REQUEST

router = GuardedRouter(tags=["tools"])


@router.operation(TOOL_REQUEST, "Call a tool", ToolResult, 404, 409, 413, 422, 429, 502)
async def tool_request(id: SandboxId, body: ToolRequest, plane: Plane, caller: Who) -> Response:
    """`create_file` takes `path`, `content` or `content_base64`, and `mode`; `python_exec` takes the fields of
    `run_python`.
    """
    return as_json(await plane.tools.call(caller, id, body))
