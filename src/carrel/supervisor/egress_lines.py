"""Outbound connections of a sandbox on another machine: the server has opened lines to the supervisor, and takes them
from there. So the machine of the sandbox needs no way out, and the one to its server is known by its SPIFFE ID.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque

from carrel.primitives.relay_line import RelayLine
from carrel.supervisor.relay import PATIENCE_S


class EgressLines:
    """The lines of the server that carries the connections of this sandbox out."""

    def __init__(self) -> None:
        self._free: deque[RelayLine] = deque()
        self._waiting: deque[asyncio.Future[RelayLine]] = deque()

    def add(self, transport: asyncio.Transport) -> RelayLine:
        """Use a connection as a line."""
        line = RelayLine(self, begins=True)
        line.connection_made(transport)
        self.idle(line)
        return line

    async def carry(self, client: socket.socket) -> None:
        """Carry the connection of a client, once there is a line. Raises `TimeoutError` if there is none for long."""
        line = await self._take()
        while not line.is_idle:  # it was lost just now
            line = await self._take()
        line.begin(len(self._waiting))
        loop = asyncio.get_running_loop()
        # The transport closes its socket when it likes; that of the caller must stay valid.
        await line.carry(lambda protocol: loop.connect_accepted_socket(protocol, client.dup()))

    async def _take(self) -> RelayLine:
        if self._free:
            return self._free.pop()
        waiting: asyncio.Future[RelayLine] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await waiting
        except BaseException:
            if waiting.done() and not waiting.cancelled():
                self.idle(waiting.result())
            raise
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)

    # the owner of lines

    def idle(self, line: RelayLine) -> None:
        """Let the next client have it."""
        if not line.is_idle:
            return
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(line)
                return
        self._free.append(line)

    def begun(self, line: RelayLine, waiting: int) -> None:
        """Refuse it: connections begin here."""
        line.abort()

    def lost(self, line: RelayLine) -> None:
        """Forget it."""
        if line in self._free:
            self._free.remove(line)
