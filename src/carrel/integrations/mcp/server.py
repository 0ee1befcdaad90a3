"""The MCP server: lists the tools, runs each call with the token of its caller, and turns every error into an answer.

Protocol versions differ in how a person is asked during a call; both ways are supported here.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from mcp import MCPError, types
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.request_state import RequestStateBoundary, RequestStateSecurity
from mcp.types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError

from carrel import __version__
from carrel.errors import ApprovalNeeded, CarrelError, PlatformError
from carrel.integrations.mcp import command_tools, file_tools, output_tools, python_tools, workspace_tools
from carrel.integrations.mcp.answers import refused
from carrel.integrations.mcp.asking import KEY, Asking, Question
from carrel.integrations.mcp.calls import Parameters, Tool, ToolCall
from carrel.integrations.mcp.clients import Clients

log = logging.getLogger("carrel.mcp")

CATALOGUE: dict[str, Tool[Any]] = {
    tool.name: tool
    for tool in (
        *command_tools.TOOLS,
        *output_tools.TOOLS,
        *python_tools.TOOLS,
        *file_tools.TOOLS,
        *workspace_tools.TOOLS,
    )
}
"""Every tool, by its name."""

CALLER = "carrel.caller"
"""The key of the ASGI scope that holds the `McpCaller` of an HTTP request."""

Context = ServerRequestContext[None, Any]


@dataclass(frozen=True)
class McpCaller:
    """The token of a caller and the context it works in."""

    token: str | None
    context_id: str

    @property
    def digest(self) -> str:
        """A name for the pair that does not reveal the token."""
        return hashlib.sha256(f"{self.token}\0{self.context_id}".encode()).hexdigest()[:32]


class WorkspaceServer:
    """An MCP server for contexts of one carrel server. Over stdio there is one caller; over HTTP each request has its
    own.
    """

    def __init__(
        self,
        *,
        url: str | None = None,
        token: str | None = None,
        context_id: str | None = None,
        template: str | None = None,
        asking: Asking | None = None,
    ):
        self.clients = Clients(url, template)
        self._token = token
        self._context_id = context_id
        self._asking = asking or Asking()
        self._declared = [tool.declared() for tool in CATALOGUE.values()]
        self._schemas = {tool.name: tool.input_schema for tool in self._declared}
        self.server: Server[None] = Server(
            "carrel",
            version=__version__,
            title="carrel",
            description="A private, durable, governed workspace.",
            lifespan=self._lifespan,
            get_tool_input_schema=self._schemas.get,
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
        )
        # State that a client sends back is sealed: it is valid only for the same call and caller on this server.
        security = RequestStateSecurity(
            keys=[secrets.token_bytes(32)], bind_principal=lambda ctx: self._caller(ctx).digest
        )
        self.server.middleware += [RequestStateBoundary(security, default_audience="carrel"), self._instruct]

    @asynccontextmanager
    async def _lifespan(self, _server: Server[None]) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await self.clients.close()

    def _caller(self, ctx: Context) -> McpCaller:
        if ctx.request is not None:
            caller: McpCaller = ctx.request.scope[CALLER]
            return caller
        if self._context_id is None:
            self._context_id = _named_after(ctx)
        return McpCaller(self._token, self._context_id)

    async def _instruct(self, ctx: Context, call_next: CallNext) -> HandlerResult:
        """Add the context to the instructions that a client receives when it connects."""
        result = await call_next(ctx)
        if ctx.method in {"initialize", "server/discover"} and isinstance(result, Mapping):
            return {**result, "instructions": instructions(self._caller(ctx).context_id)}
        return result

    async def _list_tools(self, _ctx: Context, _params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return types.ListToolsResult(tools=self._declared)

    async def _call_tool(
        self, ctx: Context, params: types.CallToolRequestParams
    ) -> types.CallToolResult | types.InputRequiredResult:
        tool = CATALOGUE.get(params.name)
        if tool is None:
            raise MCPError(types.INVALID_PARAMS, f"there is no tool '{params.name[:100]}'")
        try:
            return await self._answered(ctx, tool, params)
        except CarrelError as error:
            return refused(error, tool.name)
        except Exception as error:
            log.error("%s failed: %s", tool.name, type(error).__name__)  # noqa: TRY400 - a traceback may quote a secret
            log.debug("where", exc_info=True)
            unexpected = PlatformError("the MCP server failed unexpectedly", hint="see its own output")
            return refused(unexpected, tool.name)

    async def _answered(
        self, ctx: Context, tool: Tool[Any], params: types.CallToolRequestParams
    ) -> types.CallToolResult | types.InputRequiredResult:
        given = tool.parse(params.arguments)
        caller = self._caller(ctx)

        async def report(progress: float, message: str) -> None:
            await ctx.session.report_progress(progress, None, message)

        async with self.clients.access(caller.token, caller.context_id) as access:
            call = ToolCall(access, given.approval if isinstance(given, Parameters) else None, report)
            if params.request_state is not None:  # the second part of a call that a person was asked about
                question = Question.recalled(params.request_state)
                await self._asking.answered(question, _response(params), call)
                call.approval = question.needed.approval
                return (await tool.call(call, given)).result()
            try:
                return (await tool.call(call, given)).result()
            except ApprovalNeeded as needed:
                if not _can_ask(ctx):
                    raise
                question, form = await self._asking.question(needed, access.client)
                if ctx.protocol_version in MODERN_PROTOCOL_VERSIONS:
                    asked: types.InputRequests = {KEY: types.ElicitRequest(params=form)}
                    return types.InputRequiredResult(input_requests=asked, request_state=question.kept())
                try:
                    answer = await ctx.session.elicit_form(form.message, form.requested_schema, ctx.request_id)
                except (MCPError, ValidationError):  # the client could not ask after all
                    raise needed from None
                await self._asking.answered(question, answer, call)
                call.approval = needed.approval
            return (await tool.call(call, given)).result()


def _can_ask(ctx: Context) -> bool:
    """Return whether the client can show a form to its user, and this connection allows asking for it."""
    capabilities = ctx.session.client_capabilities
    can = None if capabilities is None else capabilities.elicitation
    if can is None or (can.form is None and can.url is not None):
        return False
    return ctx.protocol_version in MODERN_PROTOCOL_VERSIONS or ctx.session.can_send_request


def _response(params: types.CallToolRequestParams) -> types.ElicitResult | None:
    answer = (params.input_responses or {}).get(KEY)
    return answer if isinstance(answer, types.ElicitResult) else None


def _named_after(ctx: Context) -> str:
    """Return the context for a client that names none: one for each client program and working directory."""
    client = ctx.session.client_params
    name = client.client_info.name if client is not None else None
    if name is None and ctx.params is not None:  # an `initialize` that is not committed yet
        info = ctx.params.get("clientInfo")
        name = str(info.get("name")) if isinstance(info, Mapping) else None
    plain = re.sub(r"[^a-z0-9]+", "-", (name or "client").lower()).strip("-")[:40] or "client"
    return f"mcp-{plain}-{hashlib.sha256(os.fsencode(os.getcwd())).hexdigest()[:8]}"


def instructions(context_id: str) -> str:
    """Return the instructions for the client's model."""
    return (
        f"These tools work in the workspace of the carrel context '{context_id}': a private Linux machine whose files "
        "are kept. Paths are relative to the workspace; files for the person go to output/. Commands and files pass a "
        "policy: a denial names its rule, and asking again does not change it; what a person has to decide comes with "
        "an approval id, and the answer says how to go on. An answer that begins with 'carrel itself failed' is no "
        "result of a command. Long output is shortened and says how to read the rest."
    )
