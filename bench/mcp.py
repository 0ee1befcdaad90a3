"""A tool call on an MCP server that is hosted in a sandbox, through the SDK and through the official client at its URL.

Compared with the official client and the same server without carrel: over pipes to a server that the client starts;
and, to show the cost of HTTP and of the client, to the official server with the same tool on loopback.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
from mcp import Client as McpClient
from mcp import StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from bench import ground
from bench.measure import (
    BenchFailed,
    Contender,
    Progress,
    Report,
    Table,
    median,
    percentile,
    rounds,
    timed,
    timed_async,
)
from carrel.client import Client, Sandbox

ROUNDS = 300
SERVER = """
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    if message["method"] == "initialize":
        result = {"protocolVersion": message["params"]["protocolVersion"], "capabilities": {"tools": {}}}
        result["serverInfo"] = {"name": "b", "version": "1"}
    elif message["method"] == "tools/list":
        result = {"tools": [{"name": "echo", "inputSchema": {"type": "object"}}]}
    else:
        result = {"content": [{"type": "text", "text": message["params"]["arguments"]["text"]}]}
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}) + "\\n")
    sys.stdout.flush()
"""

OVER_HTTP = """
import socket, uvicorn
from mcp import types
from mcp.server.lowlevel.server import Server

async def tools(context, params):
    return types.ListToolsResult(tools=[types.Tool(name="echo", input_schema={"type": "object"})])

async def call(context, params):
    return types.CallToolResult(content=[types.TextContent(type="text", text=params.arguments["text"])])

app = Server("b", version="1", on_list_tools=tools, on_call_tool=call).streamable_http_app(stateless_http=True)
with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False)).run([listener])
"""


async def run(progress: Progress) -> Report:
    """Measure."""
    async with ground.scratch() as place, ground.server() as server:
        file = place / "server.py"
        file.write_text(SERVER)
        with Client(server.url, server.token) as client:
            box = client.sandbox("bench-mcp")
            box.files.write("server.py", SERVER.encode())
            added = box.mcp.add("echo", ["python3", "server.py"])
            assert added.discovery_error is None, added
            samples = await _measured(server, box, file, progress)
            box.terminate(delete_files=True)
    direct, http, sdk, url = samples.values()
    table = Table(f"a call of a tool, {ROUNDS} rounds", ("", "median ms", "p99 ms", "above direct, ms"))
    for name, taken in samples.items():
        table.add(name, median(taken) * 1e3, percentile(taken, 99) * 1e3, (median(taken) - median(direct)) * 1e3)
    figures = {
        "mcp_direct_ms": median(direct) * 1e3,
        "mcp_direct_http_ms": median(http) * 1e3,
        "mcp_call_ms": median(sdk) * 1e3,
        "mcp_overhead_ms": (median(sdk) - median(direct)) * 1e3,
        "mcp_url_overhead_ms": (median(url) - median(direct)) * 1e3,
        "mcp_url_over_http_ms": (median(url) - median(http)) * 1e3,
    }
    return Report({**figures}, [table])


async def _measured(server: ground.Server, box: Sandbox, file: Path, progress: Progress) -> dict[str, list[float]]:
    headers = {"authorization": f"Bearer {server.token}"}
    started = StdioServerParameters(command=sys.executable, args=["-I", str(file)])
    async with (
        McpClient(started, mode="legacy") as direct,
        _over_http() as place,
        McpClient(streamable_http_client(place)) as plain,
        httpx2.AsyncClient(headers=headers) as http,
        McpClient(streamable_http_client(box.mcp.url("echo"), http_client=http)) as outside,
    ):
        contenders: dict[str, Contender] = {
            "official client, stdio": _official(direct),
            "official client and server, HTTP": _official(plain),
            "carrel, SDK": timed(lambda: box.mcp.call("echo", "echo", text="hi"), lambda told: told.text == "hi"),
            "carrel, official client at the URL": _official(outside),
        }
        return await rounds(contenders, ROUNDS, warm_up=20, progress=progress)


@asynccontextmanager
async def _over_http() -> AsyncIterator[str]:
    """Run the official server in a separate process; yield its URL."""
    with subprocess.Popen([sys.executable, "-c", OVER_HTTP], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = await asyncio.to_thread(process.stdout.readline)
            if not port.strip():
                raise BenchFailed("the official server did not start")
            yield f"http://127.0.0.1:{port.strip()}/mcp"
        finally:
            process.terminate()


def _official(client: McpClient) -> Contender:
    return timed_async(lambda: client.call_tool("echo", {"text": "hi"}), lambda told: not told.is_error)
