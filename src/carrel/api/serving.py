"""The HTTP server under the application: takes connections on a socket until it is told to end. Knows no route."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from carrel.connections import Connections, http_protocol

_GRACE_S = 5


class HttpServer(uvicorn.Server):
    """Runs inside an event loop of others: signals belong to whoever owns it, and nothing ticks while nobody asks."""

    def __init__(self, app: ASGIApp, connections: Connections):
        super().__init__(
            uvicorn.Config(
                app,
                http=http_protocol(connections),
                backlog=connections.backlog,
                loop="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                ws_max_size=1024 * 1024,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=_GRACE_S,
            )
        )
        self._ending = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield

    async def main_loop(self) -> None:
        """Wait for the end. There is no header to renew and no count of requests to look at."""
        await self._ending.wait()

    def end(self) -> None:
        """Take no more connections, and end once those there are have been answered."""
        self.should_exit = True
        self._ending.set()
