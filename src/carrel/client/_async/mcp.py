"""`box.mcp`: the MCP servers of a context, and calls to their tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import quote

from carrel.client._async.connection import AsyncConnection
from carrel.client.deadlines import bounded_timeout
from carrel.models import (
    MAX_MCP_TIMEOUT_S,
    MCP_TIMEOUT_S,
    McpCatalogue,
    McpLog,
    McpResult,
    McpServerInfo,
    McpServerList,
    McpTool,
)

Tools = list[McpTool]

START_S = 240.0
"""A call may take this much longer than its own timeout: it may resume a sandbox and start a server."""


class AsyncMcp:
    """`box.mcp`: MCP servers that run in the sandbox.

    await box.mcp.add("fetch", ["mcp-server-fetch"], requirements=["mcp-server-fetch"])
    result = await box.mcp.call("fetch", "fetch", url="https://example.org")
    """

    def __init__(self, connection: AsyncConnection, sandbox_path: str, context_id: str | None):
        self._connection = connection
        self._context_id = context_id
        self._path = f"{sandbox_path}/mcp-servers"

    async def add(
        self,
        name: str,
        command: Sequence[str],
        *,
        variables: Mapping[str, str] | None = None,
        secret_variables: Mapping[str, str] | None = None,
        requirements: Sequence[str] | None = None,
        python: str | None = None,
        npm: Sequence[str] | None = None,
        cwd: str | None = None,
        enabled: bool = True,
    ) -> McpServerInfo:
        """Add a server that speaks MCP over standard input and output, or replace the one of that name.

        `requirements` are the Python packages and `npm` the npm packages that it needs. `secret_variables` maps
        environment variables to names of secrets. When the server does not list its tools, `.discovery_error` of the
        result says why.
        """
        body = {
            "command": command,
            "variables": variables,
            "secret_variables": secret_variables,
            "requirements": requirements,
            "python": python,
            "npm": npm,
            "cwd": cwd,
            "enabled": enabled,
        }
        return await self._connection.put(McpServerInfo, self._of(name), body, deadline=None)

    async def list(self) -> list[McpServerInfo]:
        """List the servers of the context and those that the operator runs for all. Starts nothing."""
        return (await self._connection.get(McpServerList, self._path)).items

    async def get(self, name: str) -> McpServerInfo:
        """Get one server."""
        return await self._connection.get(McpServerInfo, self._of(name))

    async def remove(self, name: str) -> None:
        """Stop a server and delete it."""
        await self._connection.send("DELETE", self._of(name))

    async def start(self, name: str) -> McpServerInfo:
        """Start a server now. The first call starts it anyway, unless `stop` was called."""
        return await self._connection.post(McpServerInfo, f"{self._of(name)}/start", deadline=START_S)

    async def stop(self, name: str) -> McpServerInfo:
        """Stop a server; calls are refused until it is started again."""
        return await self._connection.post(McpServerInfo, f"{self._of(name)}/stop")

    async def log(self, name: str, offset: int = 0) -> McpLog:
        """Read the standard error of a server; continue from `.next`."""
        return await self._connection.get(McpLog, f"{self._of(name)}/log", {"offset": offset})

    async def catalogue(self, name: str) -> McpCatalogue:
        """Get the tools, prompts and resources that are known of a server. Starts nothing."""
        return await self._connection.get(McpCatalogue, f"{self._of(name)}/catalogue")

    async def tools(self, name: str | None = None) -> Tools:
        """List the known tools of one server, or of all. Starts nothing."""
        names = [name] if name is not None else [each.name for each in await self.list()]
        found: Tools = []
        for each in names:
            found += (await self.catalogue(each)).tools
        return found

    async def refresh(self, name: str) -> McpCatalogue:
        """Ask a server again for its tools, prompts and resources. When that fails, `.error` says why."""
        return await self._connection.post(McpCatalogue, f"{self._of(name)}/refresh", deadline=None)

    async def request(
        self,
        server: str,
        tool: str,
        arguments: Mapping[str, object] | None = None,
        *,
        timeout: float = MCP_TIMEOUT_S,
    ) -> McpResult:
        """Call a tool. An error of the tool is a result with `.is_error`; a broken server raises `McpServerFailed`."""
        body = {"tool": tool, "arguments": arguments or {}, "timeout": bounded_timeout(timeout, MAX_MCP_TIMEOUT_S)}
        return await self._connection.post(McpResult, f"{self._of(server)}/request", body, deadline=timeout + START_S)

    async def call(self, server: str, tool: str, /, **arguments: object) -> McpResult:
        """Call a tool with its arguments as keywords."""
        return await self.request(server, tool, arguments)

    def url(self, name: str) -> str:
        """Return the URL at which any MCP client reaches a server, with a carrel token as bearer token."""
        context = quote(self._context_id or "", safe="")
        return f"{self._connection.address.url}/v1/sandboxes/{context}/mcp-servers/{quote(name, safe='')}/mcp"

    def _of(self, name: str) -> str:
        return f"{self._path}/{quote(name, safe='')}"
