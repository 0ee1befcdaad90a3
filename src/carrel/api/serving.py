"""The HTTP server under the application: accepts connections on a socket until it ends. Knows no route."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import uvicorn
from starlette.types import ASGIApp

from carrel.connections import Connections, NodeProtocol, http_protocol
from carrel.errors import PlatformError
from carrel.primitives.spiffe import SpiffeId

_GRACE_S = 5
_DEFER_S = 0.002
"""How long a process that has more connections than another lets the others accept first."""
_NO_DESCRIPTORS_S = 0.1


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

    def close_of(self, servers: frozenset[str]) -> None:
        """Close the connections of these servers."""
        self._connections.close_of(servers)

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

    @property
    def open_connections(self) -> int:
        """How many connections are open."""
        return len(self.server_state.connections)

    def protocol(self) -> asyncio.Protocol:
        """Return the protocol for a new connection."""
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    async def listen_too(self, path: str) -> None:
        """Also accept the connections of this user at the path of a Unix socket."""
        self.servers.append(await asyncio.get_running_loop().create_unix_server(self.protocol, sock=_bound(path)))


class SharedListener:
    """Accepts connections from a socket that other processes accept from too, one at a time. `has_more` is told
    how many this process has, and tells whether that is more than another has, which then goes first.
    """

    def __init__(self, listener: socket.socket, server: HttpServer, has_more: Callable[[int], bool]):
        self._listener = listener
        self._server = server
        self._has_more = has_more
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[object]] = set()
        self._loop.add_reader(listener, self._ready)

    def close(self) -> None:
        """Accept no more."""
        if self._timer is None:
            self._loop.remove_reader(self._listener)
        else:
            self._timer.cancel()

    @property
    def _connections(self) -> int:
        return self._server.open_connections + len(self._opening)

    def tell(self) -> None:
        """Tell how many connections there are: some may have been closed."""
        self._has_more(self._connections)

    def _ready(self) -> None:
        if self._has_more(self._connections):
            self._pause(_DEFER_S)
        else:
            self._accept()

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._timer = self._loop.call_later(seconds, self._go_on)

    def _go_on(self) -> None:
        self._timer = None
        self._loop.add_reader(self._listener, self._ready)
        self._accept()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another process was quicker, or the caller has gone
        except OSError:  # no descriptor is free
            if self._timer is None:
                self._pause(_NO_DESCRIPTORS_S)
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = self._loop.create_task(self._loop.connect_accepted_socket(self._server.protocol, connection))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        self.tell()


def _bound(path: str) -> socket.socket:
    with suppress(FileNotFoundError):
        os.unlink(path)  # of a process that was killed
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        os.chmod(path, 0o600)
    except OSError as error:
        listener.close()
        raise PlatformError(
            f"cannot listen at {path}: {error.strerror or error}",
            field="data_dir",
            hint="use a data directory with a shorter path",
        ) from None
    return listener
