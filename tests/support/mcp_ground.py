"""What tests of MCP servers share: programs that speak, or do not, and the control plane's side of a connection."""

from __future__ import annotations

import asyncio
import json
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from tests.support.sandboxes import Supervisor

END, MESSAGE, OPENED = 0, 1, 2

ECHO = """
import json, os, sys
print("ready", file=sys.stderr, flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if "exit" in asked:
        os._exit(asked["exit"])
    if "say" in asked:
        os.write(1, asked["say"].encode())
    print(json.dumps({"echo": asked, "pid": os.getpid()}), flush=True)
"""
"""Answers every line, exits or prints when it is told to."""
READS = "for line in sys.stdin: pass"
WAITING = {"backing_off", "failed"}
"""What a server is after it ended by itself, before and after it may start again."""


def python(code: str) -> list[str]:
    """The command of a server that is a few lines of Python."""
    return ["python3", "-u", "-c", textwrap.dedent(code)]


async def declare(
    supervisor: Supervisor, command: list[str], name: str = "s", generation: str = "1", **more: object
) -> dict[str, Any]:
    """Declare a server: its state."""
    body = {"command": command, "generation": generation, **more}
    return dict(await supervisor.ask("PUT", f"/mcp/{name}", body))


async def state(supervisor: Supervisor, name: str = "s") -> dict[str, Any]:
    """The state of a server."""
    return dict(await supervisor.ask("GET", f"/mcp/{name}"))


async def log(supervisor: Supervisor, name: str = "s") -> str:
    """All that is kept of a server's log."""
    return str((await supervisor.ask("GET", f"/mcp/{name}/log", limit=256 * 1024))["text"])


@dataclass
class Link:
    """A connection to a server."""

    supervisor: Supervisor
    name: str
    chunks: AsyncIterator[bytes]
    incarnation: int = 0
    pid: int = 0
    _held: bytearray = field(default_factory=bytearray)

    async def frame(self) -> tuple[int, bytes]:
        """The next frame."""
        async with asyncio.timeout(60):
            while len(self._held) < 5 or len(self._held) < 5 + int.from_bytes(self._held[1:5], "big"):
                self._held += await anext(self.chunks)
        size = int.from_bytes(self._held[1:5], "big")
        kind, data = self._held[0], bytes(self._held[5 : 5 + size])
        del self._held[: 5 + size]
        return kind, data

    async def message(self) -> dict[str, Any]:
        """The next message."""
        kind, data = await self.frame()
        assert kind == MESSAGE, data[:1000]
        return dict(json.loads(data))

    async def end(self) -> dict[str, Any]:
        """The end frame; messages before it are skipped, nothing may come after it."""
        kind, data = await self.frame()
        while kind == MESSAGE:
            kind, data = await self.frame()
        assert kind == END
        assert not self._held
        async for chunk in self.chunks:
            raise AssertionError(chunk)
        return dict(json.loads(data))

    async def send(self, message: object) -> None:
        """One message to the server."""
        line = json.dumps(message).encode()
        await self.supervisor.ask("POST", f"/mcp/{self.name}/send", line, incarnation=self.incarnation)

    async def ask(self, message: object) -> dict[str, Any]:
        """One message to the server, and its next answer."""
        await self.send(message)
        return await self.message()


async def opened(supervisor: Supervisor, name: str, answer: httpx.Response) -> Link:
    """A connection of which nothing was read yet."""
    assert answer.status_code == 200, await answer.aread()
    link = Link(supervisor, name, answer.aiter_bytes())
    kind, data = await link.frame()
    assert kind == OPENED
    told = json.loads(data)
    link.incarnation, link.pid = told["incarnation"], told["pid"]
    return link


@asynccontextmanager
async def connected(supervisor: Supervisor, name: str = "s") -> AsyncIterator[Link]:
    """A connection that must come about."""
    async with supervisor.http.stream("POST", f"/mcp/{name}/connect") as answer:
        yield await opened(supervisor, name, answer)


async def ends(supervisor: Supervisor, code: str, name: str = "s") -> dict[str, Any]:
    """Declare a server, connect to it, and read until it has ended."""
    await declare(supervisor, python(code), name)
    async with connected(supervisor, name) as link:
        return await link.end()
