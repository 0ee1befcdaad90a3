"""The HTTP server under the application: accepts connections on a socket until it ends. Knows no route."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from carrel.connections import Connections, NodeProtocol, http_protocol
from carrel.primitives.spiffe import SpiffeId

_GRACE_S = 5


class HttpServer(uvicorn.Server):
    """Runs in the event loop of its owner, which handles signals; has no periodic work."""

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
                # A caller that is suspended (Ctrl-Z) answers no ping. `Connections` notices a machine that is gone.
                ws_ping_timeout=None,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=_GRACE_S,
            )
        )
        self._connections = connections
        self._ending = asyncio.Event()

    def node_protocol(self, accepts: Callable[[SpiffeId], bool]) -> Callable[[], asyncio.Protocol]:
        """Return a factory of protocols for connections of other servers, which ends with this server."""
        return lambda: NodeProtocol(self._connections, accepts, self.config, self.server_state, {})

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none: the owner of the event loop does."""
        yield

    async def main_loop(self) -> None:
        """Wait for the end, without the periodic tick of uvicorn."""
        await self._ending.wait()

    def end(self) -> None:
        """Accept no more connections, and end when the open requests are answered."""
        self.should_exit = True
        self._ending.set()
