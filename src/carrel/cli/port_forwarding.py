"""Forwards a port of this machine to a port of a sandbox: each connection is one WebSocket to the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from carrel.errors import CarrelError, InvalidRequest
from carrel.primitives import tasks

if TYPE_CHECKING:
    from carrel.client import AsyncSandbox
    from carrel.client._async.port_tunnel import AsyncPortTunnel

MOST = 256
_CHUNK = 64 * 1024


async def forward(
    context: str,
    port: int,
    host: str,
    local: int,
    wait: float | None,
    listening: Callable[[str], None],
    tell: Callable[[str], None],
) -> None:
    """Accept connections until this task is cancelled; then all of them are closed."""
    from carrel.client import AsyncClient

    async with AsyncClient(administrator=True) as client:
        box = client.attach(await client.find(context))
        if wait is not None:
            await box.ports.wait(port, wait)
        forwarder = _Forwarder(box, port, tell)
        try:
            server = await asyncio.start_server(forwarder.accept, host, local, limit=_CHUNK)
        except OSError as error:
            raise InvalidRequest(
                f"cannot listen on {host}:{local}: {error.strerror or error}",
                field="--local",
                hint="another program may use it; --local 0 picks a free one",
            ) from None
        try:
            address = server.sockets[0].getsockname()
            listening(f"{address[0]}:{address[1]}")
            await asyncio.get_running_loop().create_future()
        finally:
            server.close()
            await forwarder.close()


class _Forwarder:
    """The connections to one port."""

    def __init__(self, box: AsyncSandbox, port: int, tell: Callable[[str], None]):
        self._box = box
        self._port = port
        self._tell = tell
        self._room = asyncio.Semaphore(MOST)
        self._tasks: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward a connection."""
        task = asyncio.get_running_loop().create_task(self._carry(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Close all connections."""
        await tasks.cancel(list(self._tasks))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with self._room, await self._box.ports.connect(self._port) as tunnel:
                inward = asyncio.ensure_future(_inward(reader, tunnel))
                try:
                    await _outward(tunnel, writer)
                finally:
                    await tasks.cancel([inward])
        except CarrelError as error:
            self._tell(f"carrel: {error}")
        except OSError:
            pass  # the program on this machine has gone
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


async def _inward(reader: asyncio.StreamReader, tunnel: AsyncPortTunnel) -> None:
    try:
        while data := await reader.read(_CHUNK):
            await tunnel.send(data)
        await tunnel.end()
    except OSError:
        await tunnel.close()
    except CarrelError:
        return  # the other direction says why


async def _outward(tunnel: AsyncPortTunnel, writer: asyncio.StreamWriter) -> None:
    while data := await tunnel.recv():
        writer.write(data)
        await writer.drain()
