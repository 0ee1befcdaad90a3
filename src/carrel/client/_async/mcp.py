"""`box.mcp`: the MCP servers of a context, and calls of their tools. Knows only their routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import quote

from carrel.client._async.connection import AsyncConnection, encoded
from carrel.client.deadlines import limited
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
"""What a call may take besides its own time: a sandbox is resumed for it, a server started."""


class AsyncMcp:
    """`box.mcp`."""

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
        """Add a server that speaks over its standard input and output, or replace the one of that name.

        `requirements` are Python packages and `npm` packages of npm that it needs. `secret_variables` gives it
        variables whose values are secrets, by their names. Why it could not be asked for its tools is in
        `.discovery_error`.
        """
        body = {
            "command": [*command],
            "variables": None if variables is None else {**variables},
            "secret_variables": None if secret_variables is None else {**secret_variables},
            "requirements": None if requirements is None else [*requirements],
            "python": python,
            "npm": None if npm is None else [*npm],
            "cwd": cwd,
            "enabled": enabled,
        }
        connection = self._connection
        return await connection.put(McpServerInfo, self._of(name), encoded(body), timeout=connection.patience(None))

    async def list(self) -> list[McpServerInfo]:
        """The servers of the context, and those the operator runs for all. Starts nothing."""
        return (await self._connection.get(McpServerList, self._path)).items

    async def get(self, name: str) -> McpServerInfo:
        """One server."""
        return await self._connection.get(McpServerInfo, self._of(name))

    async def remove(self, name: str) -> None:
        """End a server and forget it."""
        await self._connection.call("DELETE", self._of(name))

    async def start(self, name: str) -> McpServerInfo:
        """Start a server now. One that is not stopped is started by the first call anyway."""
        connection = self._connection
        patience = connection.patience(START_S)
        return await connection.post(McpServerInfo, f"{self._of(name)}/start", b"", timeout=patience)

    async def stop(self, name: str) -> McpServerInfo:
        """End a server; calls are refused until it is started again."""
        return await self._connection.post(McpServerInfo, f"{self._of(name)}/stop", b"")

    async def log(self, name: str, offset: int = 0) -> McpLog:
        """What a server wrote to its standard error; go on from `.next`."""
        return await self._connection.get(McpLog, f"{self._of(name)}/log", {"offset": offset})

    async def catalogue(self, name: str) -> McpCatalogue:
        """What a server offers, as it is known. Starts nothing."""
        return await self._connection.get(McpCatalogue, f"{self._of(name)}/catalogue")

    async def tools(self, name: str | None = None) -> Tools:
        """The tools of a server, or of all of them, by what is known. Starts nothing."""
        names = [name] if name is not None else [each.name for each in await self.list()]
        found: Tools = []
        for each in names:
            found += (await self.catalogue(each)).tools
        return found

    async def refresh(self, name: str) -> McpCatalogue:
        """Ask a server what it offers now; why it could not be asked is in `.error`."""
        connection = self._connection
        patience = connection.patience(None)
        return await connection.post(McpCatalogue, f"{self._of(name)}/refresh", b"", timeout=patience)

    async def request(
        self,
        server: str,
        tool: str,
        arguments: Mapping[str, object] | None = None,
        *,
        timeout: float = MCP_TIMEOUT_S,
    ) -> McpResult:
        """Call a tool. What the tool complains of is a result with `.is_error`; `McpServerFailed` when its server is
        of no use.
        """
        body = encoded(
            {"tool": tool, "arguments": {**(arguments or {})}, "timeout": limited(timeout, MAX_MCP_TIMEOUT_S)}
        )
        connection = self._connection
        patience = connection.patience(timeout + START_S)
        return await connection.post(McpResult, f"{self._of(server)}/request", body, timeout=patience)

    async def call(self, server: str, tool: str, /, **arguments: object) -> McpResult:
        """The same, with the tool's arguments by name."""
        return await self.request(server, tool, arguments)

    def url(self, name: str) -> str:
        """Where any MCP client connects to a server, with a token of carrel as its bearer token. It lasts as long as
        the context.
        """
        context = quote(self._context_id or "", safe="")
        return f"{self._connection.address.url}/v1/sandboxes/{context}/mcp-servers/{quote(name, safe='')}/mcp"

    def _of(self, name: str) -> str:
        return f"{self._path}/{quote(name, safe='')}"
