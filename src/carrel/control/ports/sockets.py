"""A WebSocket to a server in a sandbox, over a stream. Messages are passed on whole, so a visitor cannot send anything
else through it, and a server neither.
"""

from __future__ import annotations

import asyncio
from collections import deque

from websockets.client import ClientProtocol
from websockets.datastructures import Headers as SocketHeaders
from websockets.exceptions import InvalidHandshake, InvalidStatus, ProtocolError
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.typing import Subprotocol
from websockets.uri import WebSocketURI

from carrel.control.ports.headers import Headers
from carrel.control.supervisor.connection import SupervisorStream
from carrel.errors import PortNotOpen

MAX_MESSAGE = 1024 * 1024
"""The largest message in either direction; the API takes no larger ones either."""
OPEN_S = 60.0


class SocketRefused(Exception):
    """The server answered the handshake with another status."""

    def __init__(self, status: int, headers: Headers, body: bytes):
        super().__init__(status)
        self.status = status
        self.headers = headers
        self.body = body


class PortSocket:
    """One WebSocket. `open` it before anything else."""

    def __init__(self, stream: SupervisorStream, port: int):
        self._stream = stream
        self._port = port
        self._arrived: deque[str | bytes] = deque()
        self._parts: list[bytes] = []
        self._text = False
        self._protocol: ClientProtocol | None = None
        self.subprotocol: str | None = None
        self.close_code, self.close_reason = 1006, ""

    async def open(self, target: str, host: str, headers: Headers, subprotocols: list[str]) -> None:
        """Shake hands. Raises `SocketRefused` or `PortNotOpen`."""
        offered = [Subprotocol(each) for each in subprotocols] or None
        path, _, query = target.partition("?")
        where = WebSocketURI(secure=False, host="localhost", port=self._port, path=path, query=query)
        self._protocol = protocol = ClientProtocol(where, subprotocols=offered, max_size=MAX_MESSAGE)
        request = protocol.connect()
        del request.headers["Host"]
        extra = SocketHeaders()
        extra["Host"] = host
        for name, value in headers:
            extra[name.decode("latin-1")] = value.decode("latin-1")
        request.headers.update(extra)
        protocol.send_request(request)
        try:
            async with asyncio.timeout(OPEN_S):
                await self._flush()
                while protocol.state is State.CONNECTING and protocol.handshake_exc is None:
                    await self._receive()
        except TimeoutError:
            raise self._wrong("did not answer in time") from None
        if protocol.handshake_exc is not None:
            raise self._refused(protocol.handshake_exc)
        self.subprotocol = protocol.subprotocol

    def _refused(self, error: Exception) -> Exception:
        if isinstance(error, InvalidStatus):
            answer = error.response
            headers = [(n.lower().encode("latin-1"), v.encode("latin-1")) for n, v in answer.headers.raw_items()]
            if 200 <= answer.status_code < 600:
                return SocketRefused(answer.status_code, headers, bytes(answer.body or b""))
        kind = "opened no WebSocket" if isinstance(error, InvalidHandshake) else "sent something that is not HTTP"
        return self._wrong(f"{kind} ({str(error)[:200]})")

    async def recv(self) -> str | bytes | None:
        """Wait for the next message; None when the server has closed the WebSocket."""
        while not self._arrived:
            protocol = self._opened()
            if protocol.state is State.CLOSED or protocol.close_rcvd is not None or self._stream.ended:
                self._take()
                if self._arrived:
                    break
                if protocol.close_rcvd is not None:
                    self.close_code, self.close_reason = protocol.close_rcvd.code, protocol.close_rcvd.reason
                elif protocol.close_sent is not None:  # the server broke the protocol
                    self.close_code, self.close_reason = 1011, protocol.close_sent.reason
                return None
            await self._receive()
        return self._arrived.popleft()

    async def send(self, message: str | bytes) -> None:
        """Send a message; waits while the server is behind."""
        protocol = self._opened()
        if protocol.state is not State.OPEN:
            return
        if isinstance(message, str):
            protocol.send_text(message.encode())
        else:
            protocol.send_binary(message)
        await self._flush()

    async def close(self, code: int, reason: str = "") -> None:
        """Tell the server that the visitor has gone."""
        protocol = self._opened()
        if protocol.state is State.OPEN:
            known = code in {1000, 1001} or 3000 <= code < 5000
            try:
                protocol.send_close(code if known else 1000, reason[:100])
                async with asyncio.timeout(1.0):
                    await self._flush()
            except (ProtocolError, PortNotOpen, TimeoutError):
                pass

    def _opened(self) -> ClientProtocol:
        assert self._protocol is not None
        return self._protocol

    async def _receive(self) -> None:
        protocol, data = self._opened(), await self._stream.read()
        if data:
            protocol.receive_data(data)
        else:
            protocol.receive_eof()
        self._take()
        await self._flush()

    def _take(self) -> None:
        for event in self._opened().events_received():
            if not isinstance(event, Frame) or event.opcode not in {Opcode.TEXT, Opcode.BINARY, Opcode.CONT}:
                continue
            if event.opcode is not Opcode.CONT:
                self._text, self._parts = event.opcode is Opcode.TEXT, []
            self._parts.append(bytes(event.data))
            if event.fin:
                data, self._parts = b"".join(self._parts), []
                self._arrived.append(data.decode("utf-8", "replace") if self._text else data)

    async def _flush(self) -> None:
        for data in self._opened().data_to_send():
            if data:
                await self._stream.write(data)

    def _wrong(self, what: str) -> PortNotOpen:
        return PortNotOpen(f"the server on port {self._port} {what}", hint="see its output", port=self._port)
