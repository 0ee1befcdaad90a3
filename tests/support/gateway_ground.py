"""What tests of the gateway share: servers that echo and greet, curl, and names that lead to them."""

from __future__ import annotations

import asyncio
import os

from tests.support.wayout import CLOSED, OPEN

NAMES = {"a.test": [OPEN], "b.test": [OPEN], "bad.test": [CLOSED], "in.test": [OPEN]}


class Echo:
    """A server that sends back what it gets, and remembers it."""

    def __init__(self) -> None:
        self.got = b""
        self.connections = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while data := await reader.read(65536):
            self.got += data
            writer.write(data)
            await writer.drain()


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A small HTTP server."""
    while head := await reader.readuntil(b"\r\n\r\n"):
        body = b"you are at " + head.partition(b"\r\nHost: ")[2].partition(b"\r\n")[0]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()


async def curl(*arguments: str) -> tuple[int, str]:
    """The exit code of curl and what it printed."""
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    process = await asyncio.create_subprocess_exec(
        "curl", "-sS", "--max-time", "20", *arguments, stdout=-1, stderr=-2, env=environment
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


def rules(port: int) -> list[str]:
    return [f"{name}:{port}" for name in NAMES] + [OPEN]
