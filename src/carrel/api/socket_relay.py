"""Passes a WebSocket on to the server that has the session: messages in both directions, one at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from starlette.types import Message, Receive, Scope, Send

from carrel.api.problems import MOVED_HEADER
from carrel.control.nodes.peers import NotConnected, Peer, unreachable
from carrel.primitives import tasks

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

MAX_REFUSAL = 64 * 1024
Dial = Callable[[], Coroutine[Any, Any, "ClientConnection"]]
"""Opens the WebSocket to the other server."""

_CONNECTED = "carrel.connected"
"""Set in the scope of a WebSocket when its first message was taken."""


def with_first_message(scope: Scope, receive: Receive) -> Receive:
    """Return a `receive` that begins with the first message of a WebSocket if that was taken."""
    given = not scope.get(_CONNECTED)

    async def messages() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "websocket.connect"}

    return messages


class SocketRelay:
    """A WebSocket that is passed on."""

    def __init__(self, peer: Peer, dial: Dial, scope: Scope, receive: Receive, send: Send):
        self._peer = peer
        self._dial = dial
        self._scope = scope
        self._receive = receive
        self._send = send

    async def run(self) -> bool:
        """Connect, and pass messages on until one side closes; False if the other server did nothing."""
        from websockets.exceptions import InvalidHandshake, InvalidStatus

        if not self._scope.get(_CONNECTED):
            await self._receive()  # `websocket.connect`, once
            self._scope[_CONNECTED] = True
        opening = asyncio.ensure_future(self._dial())
        leaving = asyncio.ensure_future(self._receive())
        try:
            await asyncio.wait({opening, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                return True  # the caller has gone
            try:
                socket = opening.result()
            except InvalidStatus as error:
                answer = error.response
                return await self._refused(answer.status_code, answer.headers.raw_items(), bytes(answer.body or b""))
            except (OSError, TimeoutError):
                raise NotConnected from None
            except (InvalidHandshake, EOFError):
                raise unreachable(self._peer.record.name, "broke off while a WebSocket was opened") from None
            try:
                await self._send({"type": "websocket.accept", "subprotocol": socket.subprotocol})
                await self._pump(socket, leaving)
            finally:
                self._peer.ended(socket)
            return True
        finally:
            await tasks.cancel([opening, leaving])

    async def _refused(self, status: int, given: Any, body: bytes) -> bool:
        headers = [(str(name).lower().encode("latin-1"), str(value).encode("latin-1")) for name, value in given]
        if any(name == MOVED_HEADER.encode() for name, _ in headers):
            return False
        if status == 401 and b'"Carrel-Forwarded"' in body:
            return False
        if "websocket.http.response" not in self._scope.get("extensions", {}):
            await self._send({"type": "websocket.close", "code": 1008})
            return True
        kept = [pair for pair in headers if pair[0] in {b"content-type", b"retry-after", b"www-authenticate"}]
        kept.append((b"content-length", b"%d" % len(body[:MAX_REFUSAL])))
        await self._send({"type": "websocket.http.response.start", "status": status, "headers": kept})
        await self._send({"type": "websocket.http.response.body", "body": body[:MAX_REFUSAL]})
        return True

    async def _pump(self, socket: ClientConnection, leaving: asyncio.Future[Any]) -> None:
        outward = asyncio.ensure_future(self._outward(socket, leaving))
        inward = asyncio.ensure_future(self._inward(socket))
        try:
            await asyncio.wait({outward, inward}, return_when=asyncio.FIRST_COMPLETED)
            if inward.done():
                inward.result()
            elif outward.done():
                outward.result()
        finally:
            await tasks.cancel([outward, inward])

    async def _outward(self, socket: ClientConnection, first: asyncio.Future[Any]) -> None:
        from websockets.exceptions import ConnectionClosed

        message = await first
        while message["type"] == "websocket.receive":
            data = message.get("bytes")
            try:
                await socket.send(message["text"] if data is None else data)
            except ConnectionClosed:
                await asyncio.Event().wait()  # the other direction tells the caller why
            message = await self._receive()
        code = message.get("code") or 1000
        await socket.close(code if code in {1000, 1001} or 3000 <= code < 5000 else 1000)

    async def _inward(self, socket: ClientConnection) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            while True:
                data = await socket.recv()
                kind = "text" if isinstance(data, str) else "bytes"
                await self._send({"type": "websocket.send", kind: data})
        except ConnectionClosed as error:
            closed = error.rcvd
        except OSError:
            return  # the caller has gone
        if closed is None:
            lost = unreachable(
                self._peer.record.name, "went away", hint="what was asked for may have been done; ask again"
            )
            await self._send({"type": "websocket.send", "text": json.dumps({"error": lost.problem()})})
            await self._send({"type": "websocket.close", "code": 1011, "reason": lost.code})
        else:
            await self._send({"type": "websocket.close", "code": closed.code, "reason": closed.reason})
