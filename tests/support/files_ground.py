"""A workspace's file calls served on a socket, for tests of them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from carrel.supervisor.files import Files
from carrel.supervisor.http import HttpConnection, HttpRouter

MIB = 1024 * 1024


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Box:
    """A workspace served on a socket, with something beside it that must stay untouched."""

    top: Path
    workspace: Path
    files: Files
    address: str
    connections: list[asyncio.StreamWriter] = field(default_factory=list)

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(self.address, limit=MIB)
        self.connections.append(writer)
        return reader, writer

    async def call(self, method: str, target: str, body: bytes = b"", **query: object) -> Answer:
        reader, writer = await self.open()
        writer.write(head(method, target, len(body), **query) + body)
        answer = await receive(reader)
        writer.close()
        return answer

    async def put(self, path: str, body: bytes, **query: object) -> Answer:
        return await self.call("PUT", "/files/content", body, path=path, **query)

    async def get(self, path: str, **query: object) -> Answer:
        return await self.call("GET", "/files/content", b"", path=path, **query)

    async def post(self, target: str, **body: object) -> Answer:
        return await self.call("POST", target, json.dumps(body).encode())


def head(method: str, target: str, size: int, /, **query: object) -> bytes:
    encoded = "&".join(f"{key}={quote(str(value).encode('utf-8', 'surrogateescape'))}" for key, value in query.items())
    return f"{method} {target}?{encoded} HTTP/1.1\r\nhost: x\r\ncontent-length: {size}\r\n\r\n".encode()


async def receive_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    pairs = ((name, value) for name, _, value in (line.partition(": ") for line in lines[1:] if line))
    return int(lines[0].split()[1]), dict(pairs)


async def receive(reader: asyncio.StreamReader) -> Answer:
    status, headers = await receive_head(reader)
    return Answer(status, headers, await reader.readexactly(int(headers["content-length"])))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


async def serve(top: Path) -> AsyncIterator[Box]:
    (top / "canary").write_text("outside")
    workspace = top / "workspace"
    workspace.mkdir()
    before = descriptors()
    files = Files()
    files.configure(str(workspace))
    router = HttpRouter(lambda _run: None)
    files.routes(router)
    tasks: set[asyncio.Task[None]] = set()
    address = str(top / "socket")
    server = await asyncio.get_running_loop().create_unix_server(lambda: HttpConnection(router, tasks), address)
    box = Box(top, workspace, files, address)
    try:
        yield box
        assert (top / "canary").read_text() == "outside"
        assert sorted(os.listdir(top)) == ["canary", "socket", "workspace"]
    finally:
        for writer in box.connections:
            writer.close()
        server.close()
        await until(lambda: not tasks)
        files.close()
        os.unlink(address)
    await until(lambda: descriptors() <= before)
