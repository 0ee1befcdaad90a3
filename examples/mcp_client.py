"""An MCP client that works in a carrel workspace: the official client, which starts `carrel mcp` itself.

    carrel serve &
    python examples/mcp_client.py

The extra `mcp` has what it needs (docs/how-to/install.md).
"""

from __future__ import annotations

import asyncio
import os
import sys

from mcp import Client, StdioServerParameters
from mcp.types import CallToolResult, TextContent


def text(result: CallToolResult) -> str:
    """What a model would read."""
    return "\n".join(block.text for block in result.content if isinstance(block, TextContent))


async def heard(progress: float, _total: float | None, message: str | None) -> None:
    """Called every second while a command runs."""
    print(f"… {message}")


async def main(context: str) -> None:
    """List the tools, run a command, write and read a file, and be refused."""
    carrel = StdioServerParameters(
        command=sys.executable, args=["-m", "carrel", "mcp", "--context", context], env={**os.environ}
    )
    async with Client(carrel) as client:
        print(client.instructions, "\n")
        for tool in (await client.list_tools()).tools:
            print(f"{tool.name:20} {tool.title}")

        counting = {"command": "for i in 1 2 3; do echo step $i; sleep 0.5; done"}
        result = await client.call_tool("run_command", counting, progress_callback=heard)
        print(text(result))

        await client.call_tool("write_file", {"path": "output/hello.txt", "content": "hello\n"})
        print(text(await client.call_tool("read_file", {"path": "output/hello.txt"})))
        print(text(await client.call_tool("python", {"code": "print(6 * 7)"})))

        missing = await client.call_tool("read_file", {"path": "none"})
        print("refused:", missing.structured_content["code"])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "mcp-example"))
