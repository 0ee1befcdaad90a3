"""The URL of an MCP server of a context: the official server side of MCP, which asks the control plane.

Imported when a client first connects: the package takes long to import. Each request is served without a session, so
any server on the database can answer it. Lists come from the catalogue and start nothing. Requests of a hosted server
to its client (sampling, roots, elicitation) are refused in the sandbox, and do not come here.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from mcp import MCPError, types
from mcp.server.lowlevel.server import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.dispatcher import ProgressFnT
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from carrel.api.mcp_calls import PlainCall, invalid_answer, plain_call
from carrel.api.problems import UNEXPECTED
from carrel.connections import replay
from carrel.control.mcp.links import REFUSED, TIMED_OUT
from carrel.control.operations.caller import Caller
from carrel.control.plane import ControlPlane
from carrel.control.supervisor.connection import Json
from carrel.errors import ApprovalNeeded, CarrelError, PlatformError
from carrel.models import McpCatalogue, McpRequest

log = logging.getLogger("carrel.api")
for _noisy in ("mcp.server.streamable_http_manager", "mcp.server.streamable_http", "mcp.server.lowlevel.server"):
    logging.getLogger(_noisy).setLevel(logging.WARNING)

LONGEST_S = 600.0
"""How long a call may take; a client that disconnects cancels it before."""
BRIEF_S = 0.2
"""How long a plain call may take before the package serves it, which notices a disconnect and keeps the connection
alive.
"""
Context = Any
"""The context object that the package gives to a handler."""
M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


class McpResponse(Response):
    """Answers one request of an MCP client."""

    def __init__(self, plane: ControlPlane, caller: Caller, sandbox: str, offered: McpCatalogue):
        super().__init__()
        self._plane = plane
        self._caller = caller
        self._sandbox = sandbox
        self._offered = offered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a short plain call here; let the package serve everything else."""
        body = await Request(scope, receive).body()
        plain = plain_call(scope, body)
        work = RequestWork()
        try:
            if plain is None:
                await self._serve(scope, replay(body, receive), send, work)
                return
            begun = work.begin(called(self._plane, self._caller, self._sandbox, self._offered.server, plain.params))
            await asyncio.wait({begun}, timeout=BRIEF_S)
            if begun.done():
                await self._answer(plain, begun, scope, receive, send)
            else:
                await self._serve(scope, replay(body, receive), send, work, begun)
        finally:
            await work.end()

    async def _answer(
        self, plain: PlainCall, begun: asyncio.Future[Json], scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            status, body = plain.answered(begun.result(), _info(self._offered))
        except MCPError as error:
            status, body = plain.refused(error)
        await Response(body, status, media_type="application/json")(scope, receive, send)

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, work: RequestWork, begun: asyncio.Task[Json] | None = None
    ) -> None:
        manager = StreamableHTTPSessionManager(
            served(self._plane, self._caller, self._sandbox, self._offered, work, begun),
            stateless=True,
            max_request_body_size=self._plane.settings.max_body,
        )
        async with manager.run():
            await manager.handle_request(scope, receive, send)


class RequestWork:
    """The work for one request, in tasks of its own. The package cancels a request repeatedly until it has ended, also
    during cleanup; work in these tasks is cancelled once, and then waited for.
    """

    def __init__(self) -> None:
        self._under_way: set[asyncio.Task[Any]] = set()
        self._broken_off: set[asyncio.Task[Any]] = set()

    def begin(self, asked: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(asked)
        self._under_way.add(task)
        return task

    async def done(self, task: asyncio.Task[T]) -> T:
        """Wait for a task. If the caller is cancelled, the task is cancelled too."""
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._break_off(task)
            raise

    async def end(self) -> None:
        """Cancel the tasks that still run, and wait for them."""
        for task in self._under_way:
            self._break_off(task)
        if self._under_way:
            await asyncio.wait(self._under_way)
        for task in self._under_way:
            if not task.cancelled():
                task.exception()  # mark it as retrieved

    def _break_off(self, task: asyncio.Task[Any]) -> None:
        if task not in self._broken_off:
            self._broken_off.add(task)
            task.cancel()


def _info(offered: McpCatalogue) -> Json:
    info = offered.server_info or {}
    return {"name": str(info.get("name") or offered.server), "version": str(info.get("version") or "")}


async def called(
    plane: ControlPlane,
    caller: Caller,
    sandbox: str,
    server: str,
    params: types.CallToolRequestParams,
    progress: ProgressFnT | None = None,
) -> Json:
    """Call a tool; return the result of the protocol. A refusal by carrel is a result too. `MCPError`."""
    try:
        wanted = McpRequest(tool=params.name, arguments=params.arguments or {}, timeout=LONGEST_S)
    except ValidationError:
        raise MCPError(code=types.INVALID_PARAMS, message="this is not the name of a tool") from None
    try:
        result = await plane.mcp.request(caller, sandbox, server, wanted, progress=progress)
    except PlatformError as error:
        raise _failure(error) from None
    except CarrelError as error:
        return _explained(error)
    except Exception as error:
        raise _unexpected(error) from None
    if result.error is not None:
        raise MCPError(code=result.error.code, message=result.error.message)
    answer = {"content": result.content, "structuredContent": result.structured_content, "isError": result.is_error}
    return {key: value for key, value in answer.items() if value is not None}


def served(
    plane: ControlPlane,
    caller: Caller,
    sandbox: str,
    offered: McpCatalogue,
    work: RequestWork,
    begun: asyncio.Task[Json] | None = None,
) -> Server[Any]:
    """Build the server side for one MCP server of a context. `begun` is its call, if that is already under way."""
    name = offered.server

    async def answered(asked: Coroutine[Any, Any, T]) -> T:
        return await work.done(work.begin(_as_protocol(asked)))

    async def list_tools(_context: Context, _params: object) -> types.ListToolsResult:
        found = await answered(plane.mcp.catalogue(caller, sandbox, name))
        tools = [
            {
                "name": each.name,
                "title": each.title,
                "description": each.description,
                "inputSchema": {"type": "object", **each.input_schema},
                "outputSchema": each.output_schema,
                "annotations": each.annotations,
            }
            for each in found.tools
        ]
        return types.ListToolsResult(tools=_valid(types.Tool, tools))

    async def list_prompts(_context: Context, _params: object) -> types.ListPromptsResult:
        found = await answered(plane.mcp.catalogue(caller, sandbox, name))
        return types.ListPromptsResult(prompts=_valid(types.Prompt, found.prompts))

    async def list_resources(_context: Context, _params: object) -> types.ListResourcesResult:
        found = await answered(plane.mcp.catalogue(caller, sandbox, name))
        return types.ListResourcesResult(resources=_valid(types.Resource, found.resources))

    async def list_templates(_context: Context, _params: object) -> types.ListResourceTemplatesResult:
        found = await answered(plane.mcp.catalogue(caller, sandbox, name))
        return types.ListResourceTemplatesResult(
            resource_templates=_valid(types.ResourceTemplate, found.resource_templates)
        )

    async def call_tool(context: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        async def report(progress: float, total: float | None, message: str | None) -> None:
            shown = None if message is None else await plane.secret_values.clean_text(sandbox, message[:2000])
            await context.session.report_progress(progress, total, shown)

        asked = begun or work.begin(called(plane, caller, sandbox, name, params, report))
        return _one(types.CallToolResult, await work.done(asked))

    async def read_resource(_context: Context, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
        answer = await answered(plane.mcp.read_resource(caller, sandbox, name, str(params.uri)))
        return _one(types.ReadResourceResult, _given(answer))

    async def get_prompt(_context: Context, params: types.GetPromptRequestParams) -> types.GetPromptResult:
        answer = await answered(plane.mcp.get_prompt(caller, sandbox, name, params.name, params.arguments))
        return _one(types.GetPromptResult, _given(answer))

    prompts, resources = bool(offered.prompts), bool(offered.resources or offered.resource_templates)
    return Server(
        **_info(offered),
        instructions=offered.instructions,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_prompts=list_prompts if prompts else None,
        on_get_prompt=get_prompt if prompts else None,
        on_list_resources=list_resources if resources else None,
        on_list_resource_templates=list_templates if resources else None,
        on_read_resource=read_resource if resources else None,
        get_tool_input_schema=lambda _tool: None,
    )


def _explained(error: CarrelError) -> Json:
    """Return a refusal as the result of a tool: text for the model, and the problem object that
    every protocol shows.
    """
    lines = [error.detail, *([error.hint] if error.hint else [])]
    if isinstance(error, ApprovalNeeded):
        lines.append(f"It waits as approval {error.approval}. Call again with the same arguments once it is approved.")
    problem = json.loads(json.dumps(error.problem(), default=str))
    text = "\n".join([*lines, json.dumps(problem)])
    return {"content": [{"type": "text", "text": text}], "structuredContent": problem, "isError": True}


def _failure(error: CarrelError) -> MCPError:
    problem = json.loads(json.dumps(error.problem(), default=str))
    code = types.INTERNAL_ERROR if error.status >= 500 else types.INVALID_REQUEST
    return MCPError(code=code, message=str(error), data=problem)


def _unexpected(error: Exception) -> MCPError:
    log.error("an MCP request failed: %s", type(error).__name__)  # its message may contain a secret
    return _failure(UNEXPECTED)


async def _as_protocol(asked: Coroutine[Any, Any, T]) -> T:
    """Await an answer of the control plane; raise its errors as errors of the protocol."""
    try:
        return await asked
    except CarrelError as error:
        raise _failure(error) from None
    except Exception as error:
        raise _unexpected(error) from None


def _given(answer: Json) -> Json:
    """Return the answer of a server, or raise its error."""
    if TIMED_OUT in answer:
        raise MCPError(code=types.INTERNAL_ERROR, message="the MCP server did not answer in time")
    if REFUSED in answer:
        raise MCPError(**answer[REFUSED])
    return answer


def _valid(model: type[M], items: list[Json]) -> list[M]:
    """Return the items that follow the protocol."""
    found: list[M] = []
    for each in items:
        try:
            found.append(model.model_validate({key: value for key, value in each.items() if value is not None}))
        except ValidationError:
            continue
    return found


def _one(model: type[M], answer: Json) -> M:
    try:
        return model.model_validate({key: value for key, value in answer.items() if value is not None})
    except ValidationError:
        raise invalid_answer() from None
