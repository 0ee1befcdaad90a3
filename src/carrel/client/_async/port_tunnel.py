"""A connection to a port of a sandbox: bytes in both directions, over a WebSocket to the server."""

from __future__ import annotations

from typing import Literal

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from carrel.client._async.connection import AsyncConnection, problem_of
from carrel.client.requests import trace_headers
from carrel.errors import PlatformError, PortNotOpen, ServerUnreachable

MAX_MESSAGE = 1024 * 1024
MAX_SENT = 256 * 1024
OPEN_S = 30.0


class AsyncPortTunnel:
    """A connection to a port of a sandbox."""

    def __init__(self, socket: ClientConnection):
        self._socket = socket
        self._ended = False

    @classmethod
    async def open(cls, connection: AsyncConnection, path: str) -> AsyncPortTunnel:
        """Connect."""
        url = f"ws{connection.address.url.removeprefix('http')}{path}"
        token = connection.address.token
        headers = {**({"authorization": f"Bearer {token}"} if token else {}), **trace_headers(), **connection.carried}
        proxy: Literal[True] | None = None if connection.address.loopback else True
        try:
            # `__aenter__` is called directly, because the blocking `connect` works only as a context manager.
            opening = connect(
                url,
                additional_headers=headers,
                compression=None,
                max_size=MAX_MESSAGE,
                proxy=proxy,
                open_timeout=OPEN_S + connection.wait_s,
            )
            return cls(await opening.__aenter__())
        except InvalidStatus as error:
            raise problem_of(error.response.status_code, error.response.body) from None
        except (OSError, WebSocketException, TimeoutError) as error:
            raise connection.unreachable(error) from None

    async def send(self, data: bytes) -> None:
        """Send bytes to the server."""
        try:
            for start in range(0, len(data), MAX_SENT):
                await self._socket.send(data[start : start + MAX_SENT])
        except ConnectionClosed:
            raise PortNotOpen("the server has closed the connection") from None

    async def end(self) -> None:
        """Tell the server that no more comes."""
        try:
            await self._socket.send(b"")
        except ConnectionClosed:
            return

    async def recv(self) -> bytes:
        """Wait for bytes of the server; empty when it sends no more."""
        if self._ended:
            return b""
        try:
            message = await self._socket.recv()
        except ConnectionClosed as closed:
            self._ended = True
            if closed.rcvd is None:
                raise ServerUnreachable("the connection to the server broke") from None
            if closed.rcvd.code != 1000:
                raise PortNotOpen(closed.rcvd.reason or "the connection to the port broke") from None
            return b""
        if isinstance(message, str):
            self._ended = True
            raise PlatformError(f"the connection to the port ended: {message[:300]}")
        self._ended = not message
        return message

    async def close(self) -> None:
        """Close both directions."""
        await self._socket.close()

    async def __aenter__(self) -> AsyncPortTunnel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
