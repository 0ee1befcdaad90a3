"""One HTTP request to a server in a sandbox, over a stream. The server is hostile: heads are bounded, parsed strictly,
bodies are passed on as they come, and whatever it does ends with this one connection, which is never used again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import h11

from carrel.control.ports.headers import Headers
from carrel.control.supervisor.connection import SupervisorStream
from carrel.errors import PortNotOpen

MAX_HEAD = 64 * 1024
MAX_FIELDS = 200
MAX_INTERIM = 16
ANSWER_S = 300.0
"""The most seconds until an answer begins, and between two pieces of one."""
_CHUNK = 64 * 1024


class PortExchange:
    """One request and its answer."""

    def __init__(self, stream: SupervisorStream, port: int):
        self._stream = stream
        self._port = port
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
        self.status = 0
        self.headers: Headers = []
        self.received = 0
        """The bytes of the body that were passed on."""

    async def send_head(self, method: str, target: bytes, headers: Headers) -> None:
        """Send the head of the request. Its headers say whether a body follows."""
        try:
            head = h11.Request(method=method, target=target, headers=[*headers, (b"connection", b"close")])
            data = self._http.send(head)
        except h11.LocalProtocolError as error:
            raise PortNotOpen(f"the request cannot be sent to port {self._port}: {error}", port=self._port) from None
        assert data is not None
        await self._stream.write(data)

    async def send_body(self, data: bytes) -> None:
        """Send a piece of the body. What the server does not want any more is dropped."""
        with suppress(h11.LocalProtocolError, PortNotOpen):
            if framed := self._http.send(h11.Data(data=data)):
                await self._stream.write(framed)

    async def end_body(self) -> None:
        """End the request."""
        with suppress(h11.LocalProtocolError, PortNotOpen):
            if framed := self._http.send(h11.EndOfMessage()):
                await self._stream.write(framed)

    async def head(self) -> None:
        """Wait for the head of the answer."""
        for _ in range(MAX_INTERIM):
            event = await self._next()
            if isinstance(event, h11.Response):
                self.status, self.headers = (
                    event.status_code,
                    [(bytes(name), bytes(value)) for name, value in event.headers],
                )
                if not 200 <= self.status < 600:
                    raise self._wrong(f"answered with the status {self.status}")
                if len(self.headers) > MAX_FIELDS:
                    raise self._wrong("sent too many headers")
                return
            if not isinstance(event, h11.InformationalResponse) or event.status_code == 101:
                raise self._wrong("did not answer the request")
        raise self._wrong("sent too many interim answers")

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the body of the answer."""
        while True:
            event = await self._next()
            if isinstance(event, h11.Data):
                self.received += len(event.data)
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return
            else:
                raise self._wrong("broke its answer off")

    async def _next(self) -> object:
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                async with asyncio.timeout(ANSWER_S):
                    self._http.receive_data(await self._stream.read())
        except TimeoutError:
            raise self._wrong("did not answer in time") from None
        except h11.RemoteProtocolError as error:
            raise self._wrong(f"sent something that is not HTTP ({error})") from None
        return event

    def _wrong(self, what: str) -> PortNotOpen:
        return PortNotOpen(f"the server on port {self._port} {what[:300]}", hint="see its output", port=self._port)
