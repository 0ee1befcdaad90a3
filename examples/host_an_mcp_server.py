"""Hosts a user's own MCP server in a workspace, calls it by the SDK, and lets the official MCP client connect to it.

    carrel serve &
    python examples/host_an_mcp_server.py

The extra `mcp` has what it needs (docs/how-to/install.md). The server here is a file of the workspace; one that is
published is added the same way, with `requirements=["mcp-server-time"]` or
`npm=["@modelcontextprotocol/server-everything"]`.
"""

from __future__ import annotations

import asyncio
import sys

import httpx2
from mcp import Client as McpClient
from mcp.client.streamable_http import streamable_http_client
from mcp.types import TextContent

from carrel import AsyncClient, Denied
from carrel.client import locate
from carrel.errors import CarrelError

SERVER = """
import json, sys

TOOLS = [
    {"name": "add", "description": "Adds two numbers.", "inputSchema": {
        "type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]}},
    {"name": "forget", "description": "Forgets everything.", "inputSchema": {"type": "object"}},
]

for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    if message["method"] == "initialize":
        result = {"protocolVersion": message["params"]["protocolVersion"], "capabilities": {"tools": {}},
                  "serverInfo": {"name": "sums", "version": "1"}}
    elif message["method"] == "tools/list":
        result = {"tools": TOOLS}
    else:
        given = message["params"].get("arguments", {})
        result = {"content": [{"type": "text", "text": str(given.get("a", 0) + given.get("b", 0))}]}
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"""
RULES = {"permissions": {"allow": ["shell(python3:*)", "mcp(sums:*)"], "deny": ["mcp(sums:forget)"]}}


async def main(context: str) -> None:
    """Add a server, call it, be refused, connect from outside, and remove everything."""
    async with AsyncClient(administrator=True) as carrel:
        box = await carrel.sandbox(context)
        await box.files.write("sums.py", SERVER.encode())
        server = await box.mcp.add("sums", ["python3", "sums.py"])
        problem = "" if server.discovery_error is None else f"; it could not be asked: {server.discovery_error}"
        print(f"{server.name} offers {server.tools} tools{problem}")
        for tool in await box.mcp.tools():
            print(f"  {tool.qualified:12} {tool.description}")
        print("2 + 3 =", (await box.mcp.call("sums", "add", a=2, b=3)).text)

        await carrel.policy(context).put(settings=RULES)
        try:
            await box.mcp.call("sums", "forget")
        except Denied as denied:
            print(f"denied by {denied.rule}: {denied.reason}")

        await box.stop()  # the server ends with its sandbox; a call starts both again
        address = locate()
        headers = {"authorization": f"Bearer {address.token}"} if address.token else {}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=60) as http,
            McpClient(streamable_http_client(box.mcp.url("sums"), http_client=http)) as client,
        ):
            print("tools, without waking anything:", [tool.name for tool in (await client.list_tools()).tools])
            answer = await client.call_tool("add", {"a": 2, "b": 5})
            print("2 + 5 =", *(block.text for block in answer.content if isinstance(block, TextContent)))

        await carrel.policy(context).delete()
        await box.terminate(delete_files=True)


if __name__ == "__main__":
    try:
        asyncio.run(main("example-of-a-hosted-server"))
    except CarrelError as error:
        sys.exit(f"error: {error}")
