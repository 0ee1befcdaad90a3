"""Limits for connections whose caller is not authenticated yet: the size of a request's head, its time, and the number
of open connections. The HTTP servers of carrel are built on these protocols.

Knows no route and no token. The application calls `mark_authenticated` when the caller has sent a valid token.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import resource
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import Any, cast

from uvicorn import Config
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from carrel.errors import CarrelError, InvalidRequest, LimitExceeded, TooLarge
from carrel.primitives.keepalive import unanswered_packets
from carrel.primitives.spiffe import SpiffeId, require_peer

log = logging.getLogger("carrel.connections")

MAX_HEAD = 32 * 1024
"""The most bytes of a request line with its headers, of trailers, and of a chunk's extensions."""
MAX_FIELDS = 100
MAX_PIPELINED = 16
"""The most requests that one connection may send before their responses."""
HEAD_S = 10.0
"""The most seconds for the head of a request, from its first byte."""
UNKNOWN_S = 20.0
"""The most seconds for a connection without a valid token."""
LOOK_S = 10.0
"""How often the server looks for callers that are gone."""
MOST_UNANSWERED = 7
"""Packets without any answer until a caller counts as gone. The pauses between them double: that takes a minute."""
_KEEPALIVE = {socket.TCP_KEEPIDLE: 20, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 4}
MAX_CONNECTIONS = 16_384
MAX_UNKNOWN = 2048
_SLICE = 8 * 1024
"""The parser gets pieces of this size, so that it never buffers much more than the largest head."""
_STATE = "carrel.connection"
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
"""Returns the next message of an ASGI request."""


def connections_allowed() -> int:
    """Return the most connections of a server: half of this process's descriptors. The other half is for sandboxes, the
    database and outbound connections.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(8, min(MAX_CONNECTIONS, soft // 2))


class OpenConnection:
    """One open connection, also after its upgrade to a WebSocket. Its caller is unknown until `authenticated` is
    called.
    """

    def __init__(self, connections: Connections, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop):
        self._connections = connections
        self._transport = transport
        self._loop = loop
        self._deadline: asyncio.TimerHandle | None = None
        self._prolonged = False
        self.answering = False
        """Whether a complete request waits for its response."""
        self.peer = _peer(transport)
        connected = transport.get_extra_info("socket")
        self.is_local = connected is not None and connected.family == socket.AF_UNIX
        """Whether it came over a Unix socket, which only programs of this user can open."""
        self.node: str | None = None
        """The server at the other end, if it was verified by its SPIFFE ID."""

    def authenticated(self) -> None:
        """Record that the caller has sent a valid token: the connection lasts until one side closes it, or the
        machine of the caller is gone.
        """
        if self._connections.now_known(self):
            self._stop_deadline()
            self._deadline = self._loop.call_later(LOOK_S, self._look)

    def begin(self) -> None:
        """Record that a request begins."""
        self._connections.now_busy(self)

    def answered(self) -> None:
        """Record that the last request was answered."""
        self.answering = False
        self._connections.now_idle(self)

    def closed(self) -> None:
        """Record that the connection was closed."""
        self._stop_deadline()
        self._connections.remove(self)

    def abort(self) -> None:
        """Close at once; unsent data is dropped."""
        self.closed()
        self._transport.abort()

    def start_deadline(self, seconds: float) -> None:
        """Close the connection if its caller is still unknown after these seconds."""
        self._deadline = self._loop.call_later(seconds, self._expired, seconds)

    def _expired(self, seconds: float) -> None:
        if self.answering and not self._prolonged:
            # The caller has sent a complete request, and the server is slow: the response gets the same time again.
            self._prolonged = True
            self.start_deadline(seconds)
        else:
            self.abort()

    def _look(self) -> None:
        """Close the connection if the machine of its caller is gone. A caller that is only suspended (Ctrl-Z) reads
        nothing and answers no ping of a WebSocket, but its kernel answers; so `TCP_USER_TIMEOUT` is no help here.
        """
        if unanswered_packets(self._transport) >= MOST_UNANSWERED:
            log.info("the machine of a caller at %s is gone", self.peer)
            self.abort()
        else:
            self._deadline = self._loop.call_later(LOOK_S, self._look)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Connections:
    """The open connections of one server.

    At most `most` are open, and at most `most_unknown` of them have an unknown caller. When a limit is reached, a new
    connection replaces the oldest one with an unknown caller: one of the same peer if that peer has more than its
    share, otherwise one of any peer. So idle connections cannot keep out a caller with a token.
    """

    def __init__(
        self,
        most: int,
        *,
        most_unknown: int | None = None,
        head_s: float = HEAD_S,
        unknown_s: float = UNKNOWN_S,
    ):
        self.most = most
        self.most_unknown = min(MAX_UNKNOWN, max(4, most // 2)) if most_unknown is None else most_unknown
        self.head_s = head_s
        self.unknown_s = unknown_s
        # A batch of this size can be accepted before any of its requests is read. It must not replace all others.
        self.backlog = max(1, min(1024, self.most_unknown // 2))
        self._unknown: dict[OpenConnection, None] = {}
        self._by_peer: dict[str, dict[OpenConnection, None]] = {}
        self._known: set[OpenConnection] = set()
        self._idle: dict[OpenConnection, None] = {}

    def __len__(self) -> int:
        return len(self._unknown) + len(self._known)

    @property
    def unknown(self) -> int:
        """The number of connections with an unknown caller."""
        return len(self._unknown)

    def add(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> OpenConnection | None:
        """Add a new connection; None if all others are busy for known callers, so that none can be replaced."""
        new = OpenConnection(self, transport, loop)
        if (len(self._unknown) >= self.most_unknown or len(self) >= self.most) and not self._close_oldest(new.peer):
            return None
        self._unknown[new] = None
        self._by_peer.setdefault(new.peer, {})[new] = None
        new.start_deadline(self.unknown_s)
        _keep_alive(transport)
        return new

    def _close_oldest(self, peer: str) -> bool:
        of_peer = self._by_peer.get(peer, {})
        share = self.most_unknown // (len(self._by_peer) + (not of_peer))
        candidates = of_peer if of_peer and len(of_peer) >= share else self._unknown or self._idle
        oldest = next(iter(candidates), None)
        if oldest is None:
            return False
        oldest.abort()
        return True

    def now_known(self, connection: OpenConnection) -> bool:
        """Record that the caller of a connection is authenticated; return whether that is new."""
        if self._forget_unknown(connection):
            self._known.add(connection)
            return True
        return False

    def now_busy(self, connection: OpenConnection) -> None:
        """Record that a connection has a request to answer."""
        self._idle.pop(connection, None)

    def now_idle(self, connection: OpenConnection) -> None:
        """Record that a connection has no request to answer."""
        if connection in self._known:
            self._idle[connection] = None

    def remove(self, connection: OpenConnection) -> None:
        """Remove a closed connection."""
        self._forget_unknown(connection)
        self._known.discard(connection)
        self._idle.pop(connection, None)

    def close_of(self, nodes: frozenset[str]) -> None:
        """Close the connections of these servers."""
        for each in [*self._unknown, *self._known]:
            if each.node in nodes:
                each.abort()

    def _forget_unknown(self, connection: OpenConnection) -> bool:
        if connection not in self._unknown:
            return False
        del self._unknown[connection]
        of_peer = self._by_peer[connection.peer]
        del of_peer[connection]
        if not of_peer:
            del self._by_peer[connection.peer]
        return True


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body that was already read, then the later messages."""
    given = False

    async def again() -> MutableMapping[str, Any]:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def mark_authenticated(scope: MutableMapping[str, Any]) -> None:
    """Record that the caller of a request has sent a valid token. Does nothing if the server is not carrel's."""
    connection = of_scope(scope)
    if connection is not None:
        connection.authenticated()


def of_scope(scope: MutableMapping[str, Any]) -> OpenConnection | None:
    """Return the connection of a request; None if the server is not carrel's."""
    return cast("OpenConnection | None", scope.get("state", {}).get(_STATE))


def _peer(transport: asyncio.Transport) -> str:
    """The peer of a connection: an IPv4 address, or an IPv6 network of the size that one host can have."""
    address = transport.get_extra_info("peername")
    host = address[0] if isinstance(address, tuple) else ""
    if ":" not in host:
        return str(host)
    try:
        return str(ipaddress.ip_network((host.partition("%")[0], 64), strict=False))
    except ValueError:
        return str(host)


def _keep_alive(transport: asyncio.Transport) -> None:
    """Let the kernel find out that the machine of a caller is gone while nothing is sent."""
    caller = transport.get_extra_info("socket")
    if caller is not None and caller.family != socket.AF_UNIX:
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            caller.setsockopt(socket.IPPROTO_TCP, option, value)


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with limits on everything that a caller can make it store or wait for."""

    def __init__(
        self,
        connections: Connections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ):
        super().__init__(config, server_state, app_state, _loop)
        self._connections = connections
        self._connection: OpenConnection | None = None
        self._websocket: WebSocketProtocol | None = None
        if self.ws_protocol_class is not None:
            self.ws_protocol_class = self._make_websocket  # type: ignore[assignment]
        self._running: RequestResponseCycle | None = None
        self._refusal: CarrelError | None = None
        self._in_head = True
        self._unparsed = 0
        """Bytes since the end of the last head, part of a body or request that the parser has reported."""
        self._head_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, or refuse it if there are too many."""
        super().connection_made(transport)
        self._connection = self._connections.add(transport, self.loop)
        if self._connection is None:
            self._refuse(LimitExceeded("the server has too many open connections", hint="try again soon"), 503)
            return
        self.app_state = {**self.app_state, _STATE: self._connection}

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection, and notify the running request: uvicorn notifies only the last one that arrived."""
        self._stop_head_deadline()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        if self._connection is not None:
            self._connection.closed()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the data in small pieces."""
        for start in range(0, len(data), _SLICE):
            piece = data[start : start + _SLICE]
            self._unparsed += len(piece)
            super().data_received(piece)
            if self._websocket is not None or self.transport.is_closing():
                self._stop_head_deadline()
                return
            if self._unparsed > MAX_HEAD:
                self._refuse(_head_too_large(), 431)
                return
        if not self._in_head or self._unparsed == 0:
            self._stop_head_deadline()
        elif self._head_deadline is None:
            self._head_deadline = self.loop.call_later(self._connections.head_s, self._head_expired)

    def _head_expired(self) -> None:
        self._head_deadline = None
        slow = InvalidRequest("the head of the request did not arrive in time", field="head", hint="try again")
        self._refuse(slow, 408)

    def _stop_head_deadline(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header or a trailer."""
        if len(self.headers) >= MAX_FIELDS:
            self._refusal = _head_too_large()
            raise self._refusal
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start a request."""
        self._in_head, self._unparsed = False, 0
        if len(self.pipeline) >= MAX_PIPELINED:
            raise LimitExceeded("too many requests were sent before their responses")
        super().on_headers_complete()
        if self._connection is not None:
            self._connection.begin()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        """Reset the count of unparsed bytes."""
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Record that a request is complete."""
        self._in_head, self._unparsed = True, 0
        if self._connection is not None and self._unanswered():
            self._connection.answering = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Continue with the next request."""
        super().on_response_complete()
        if self._connection is not None and not self._unanswered():
            self._connection.answered()

    def _unanswered(self) -> bool:
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return cycle is not None and not cycle.response_complete

    def handle_websocket_upgrade(self) -> None:
        """Hand over to the WebSocket protocol."""
        try:
            super().handle_websocket_upgrade()
        except Exception as error:
            # The library raises many kinds of errors for a head that it cannot parse.
            log.info("a WebSocket could not be opened: %s", type(error).__name__)
        socket = cast(WebSocketProtocol, self._websocket)
        if not socket.handshake_initiated:  # the library may also fail to parse the head without raising
            self.connections.discard(socket)
            self.connections.add(self)
            self.transport.set_protocol(self)
            wrong = "this is not a valid WebSocket request: a header is malformed or longer than 8 KB"
            self._refuse(InvalidRequest(wrong, field="head", hint="see /docs"), 400)

    def _make_websocket(self, **arguments: Any) -> WebSocketProtocol:
        self._websocket = WebSocketProtocol(**arguments)
        return self._websocket

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that the parser or a callback above refused."""
        if self._refusal is not None:
            self._refuse(self._refusal, 431)
        else:
            self._refuse(InvalidRequest("this is not a valid HTTP request", field="head", hint="use HTTP/1.1"), 400)

    def _refuse(self, error: CarrelError, status: int) -> None:
        """Send the error and close. Only close if the error could be taken for the response to an earlier request."""
        if self.transport.is_closing():
            return
        if self._unanswered() and (self.cycle.response_started or self.pipeline):
            self.transport.abort()
            return
        body = json.dumps({**error.problem(), "status": status}).encode()
        self.transport.write(
            STATUS_LINE[status] + b"content-type: application/problem+json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        self.transport.close()


class NodeProtocol(HttpProtocol):
    """The connection of another server, which is verified by its SPIFFE ID."""

    def __init__(
        self,
        connections: Connections,
        accepts: Callable[[SpiffeId], bool],
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
    ):
        super().__init__(connections, config, server_state, app_state)
        self._accepts = accepts
        self._accepted = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Look at the server before anything that it sends."""
        try:
            peer = require_peer(transport, self._accepts)
        except PermissionError as error:
            log.warning("a connection for servers is refused: %s", error)
            return
        self._accepted = True
        super().connection_made(transport)
        if self._connection is not None:
            self._connection.node = peer.node_name

    def data_received(self, data: bytes) -> None:
        """Read nothing of a server that is not accepted."""
        if self._accepted:
            super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        if self._accepted:
            super().connection_lost(exc)


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's protocol for WebSockets. The connection still counts."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take over the connection, whose caller waits for a response."""
        super().connection_made(transport)
        self.app_state[_STATE].answering = True

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self.app_state[_STATE].closed()
        super().connection_lost(exc)


def http_protocol(connections: Connections) -> type[asyncio.Protocol]:
    """Return the factory of protocols for uvicorn's option `http`, which expects a class but only calls it."""
    return cast("type[asyncio.Protocol]", partial(HttpProtocol, connections))


def _head_too_large() -> TooLarge:
    return TooLarge(
        f"the head of a request may have at most {MAX_HEAD} bytes and {MAX_FIELDS} fields",
        field="head",
        hint="send long values in the body",
    )
