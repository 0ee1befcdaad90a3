"""The outside as tests see it: small real servers on loopback that remember who came."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

HOST = "127.0.0.2"
"""Not 127.0.0.1: tools reach that one without their proxy."""


@dataclass
class Origin:
    """An HTTP server. `answers` maps paths to bodies; what it does not know it greets."""

    host: str = HOST
    port: int = 0
    answers: Mapping[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    hold: asyncio.Event | None = None
    """When given, answers wait for it."""

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode("latin-1").split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in lines if line)
                await reader.readexactly(int(headers.get("content-length", "0")))
                self.requests.append((first, headers))
                if self.hold is not None:
                    await self.hold.wait()
                body = self.answers.get(first.split(" ")[1], b"hello\n")
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(origin: Origin | None = None, tls: ssl.SSLContext | None = None) -> AsyncIterator[Origin]:
    """Run an HTTP server, with TLS when a context is given."""
    origin = origin or Origin()
    server = await asyncio.start_server(origin.serve, origin.host, origin.port, ssl=tls)
    origin.port = server.sockets[0].getsockname()[1]
    try:
        yield origin
    finally:
        server.close()
        if origin.hold is not None:
            origin.hold.set()
        await server.wait_closed()
