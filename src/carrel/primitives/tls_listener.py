"""Accepts connections with TLS on a socket, with a context that may change: those that are open keep theirs.

Knows no peer: the protocol looks at it when the connection is made, and aborts it if it is not accepted.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

from carrel.primitives import tasks
from carrel.primitives.spiffe import HANDSHAKE_S

MOST_HANDSHAKES = 256
"""Connections whose peer is not known yet. A new one beyond that replaces the oldest, so slow ones keep nobody out."""
_PAUSE_S = 0.1


class TlsListener:
    """Accepts connections until it is closed. `context` returns what new connections get."""

    def __init__(
        self, listener: socket.socket, context: Callable[[], ssl.SSLContext], protocol: Callable[[], asyncio.Protocol]
    ):
        listener.setblocking(False)
        self._listener = listener
        self._context = context
        self._protocol = protocol
        self._handshakes: dict[asyncio.Task[None], None] = {}

    async def run(self) -> None:
        """Accept connections until this task is cancelled. Those that are open stay open."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    accepted, _ = await loop.sock_accept(self._listener)
                except OSError:  # no descriptors are left, or the peer has gone
                    await asyncio.sleep(_PAUSE_S)
                    continue
                if len(self._handshakes) >= MOST_HANDSHAKES:
                    next(iter(self._handshakes)).cancel()
                task = loop.create_task(self._shake(accepted))
                self._handshakes[task] = None
                task.add_done_callback(lambda done: self._handshakes.pop(done, None))
        finally:
            await tasks.cancel(list(self._handshakes))

    async def _shake(self, accepted: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.connect_accepted_socket(
                self._protocol, accepted, ssl=self._context(), ssl_handshake_timeout=HANDSHAKE_S
            )
        except (OSError, TimeoutError):  # among them every refusal of TLS
            accepted.close()
        except asyncio.CancelledError:
            accepted.close()
            raise
