"""Connections to the other servers: one pool for each, with keep-alive. Knows no route and no caller.

`NodeLink` is how a server is reached: over TCP, with TLS if its address begins with `https`. With `https+spiffe` its
SPIFFE ID is verified, else the name of its host.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from carrel.control.http_wire import HttpWire
from carrel.control.nodes.registry import SPIFFE_SCHEME, UNIX, Nodes
from carrel.control.nodes.workers import server_of
from carrel.errors import LimitExceeded, NodeUnreachable, PlatformError
from carrel.primitives.keepalive import notice_loss
from carrel.primitives.spiffe import SERVER_NAME, SpiffeId, connect, require_peer
from carrel.store.nodes import NodeRecord

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

    from carrel.spiffe.identity import NodeIdentity

CONNECT_S = 3.0
MAX_OPEN = 1024
MAX_IDLE = 64
IDLE_S = 30.0
"""How long an idle connection is kept: shorter than the other server keeps it."""
MAX_MESSAGE = 4 * 1024 * 1024
"""The largest message of a WebSocket."""


class NotConnected(Exception):
    """No connection to a server could be opened: it has got nothing of the request."""


class NodeLink(Protocol):
    """How a server is reached. The caller's pass authenticates each request; a link may authenticate both servers."""

    @property
    def authority(self) -> bytes:
        """The value of the `Host` header."""

    async def connect(self, protocol: Callable[[], asyncio.Protocol]) -> None:
        """Open a connection. Raises `OSError` or `TimeoutError`."""

    async def websocket(self, target: str, headers: list[tuple[str, str]], subprotocols: list[str]) -> ClientConnection:
        """Open a WebSocket. Raises what `websockets` raises."""


@dataclass(frozen=True)
class WorkerLink:
    """A worker of this server at the path of a socket, which only this user can open."""

    path: str

    @property
    def authority(self) -> bytes:
        """See `NodeLink`."""
        return b"localhost"

    async def connect(self, protocol: Callable[[], asyncio.Protocol]) -> None:
        """See `NodeLink`."""
        async with asyncio.timeout(CONNECT_S):
            await asyncio.get_running_loop().create_unix_connection(protocol, self.path)

    async def websocket(self, target: str, headers: list[tuple[str, str]], subprotocols: list[str]) -> ClientConnection:
        """See `NodeLink`."""
        loop = asyncio.get_running_loop()
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.setblocking(False)
            async with asyncio.timeout(CONNECT_S):
                await loop.sock_connect(connected, self.path)
        except BaseException:
            connected.close()
            raise
        return await _open_websocket(f"ws://localhost{target}", connected, headers, subprotocols)


def link_to(url: str, name: str, identity: NodeIdentity | None) -> NodeLink:
    """Return how a server is reached that has this address; `PlatformError` when it is none. `identity` is that of this
    server, if servers have SPIFFE IDs.
    """
    if url.startswith(UNIX):
        return WorkerLink(url.removeprefix(UNIX))
    return TcpLink.of(url, name, identity)


@dataclass(frozen=True)
class TcpLink:
    """A server at a host and port. `id` is its SPIFFE ID; without one, its host is verified."""

    host: str
    port: int
    tls: Callable[[], ssl.SSLContext] | None
    id: SpiffeId | None = None

    @classmethod
    def of(cls, url: str, name: str, identity: NodeIdentity | None) -> TcpLink:
        """Read the address of a server; `PlatformError` when it is none. `identity` is that of this server, if servers
        have SPIFFE IDs.
        """
        schemes = {"http", "https"} if identity is None else {SPIFFE_SCHEME}
        try:
            parts = urlsplit(url)
            host, port, known = parts.hostname, parts.port, parts.scheme in schemes
        except ValueError:
            host, port, known = None, None, False
        if host is None or not known:
            raise PlatformError(f"'{url[:200]}' is not the address of a server", field="node_url")
        if identity is not None:
            if port is None:
                raise PlatformError(f"the address '{url[:200]}' of a server has no port", field="node_url")
            return cls(host, port, identity.client_context, SpiffeId.node(identity.id.trust_domain, server_of(name)))
        if parts.scheme == "http":
            return cls(host, port or 80, None)
        context = ssl.create_default_context()
        return cls(host, port or 443, lambda: context)

    @property
    def authority(self) -> bytes:
        """See `NodeLink`."""
        return (f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}").encode("ascii")

    async def connect(self, protocol: Callable[[], asyncio.Protocol]) -> None:
        """See `NodeLink`."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_S):
            tls = None if self.tls is None else self.tls()
            if self.id is not None and tls is not None:
                transport = await connect(protocol, self.host, self.port, tls, self._is_expected)
            else:
                transport, _ = await loop.create_connection(protocol, self.host, self.port, ssl=tls)
        notice_loss(transport)

    def _is_expected(self, peer: SpiffeId) -> bool:
        return peer == self.id

    async def websocket(self, target: str, headers: list[tuple[str, str]], subprotocols: list[str]) -> ClientConnection:
        """See `NodeLink`. The answer may take as long as a person needs to decide; connecting may not."""
        from websockets.asyncio.client import ClientConnection as Connection

        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_S):
            found = await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
            family, kind, proto, _, address = found[0]
            connected = socket.socket(family, kind, proto)
            try:
                connected.setblocking(False)
                await loop.sock_connect(connected, address)
            except BaseException:
                connected.close()
                raise
        scheme = "ws" if self.tls is None else "wss"
        accepts = self._is_expected

        class Verified(Connection):
            """Sends nothing to a server with another ID."""

            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                with suppress(PermissionError):  # it is aborted then
                    require_peer(transport, accepts)
                super().connection_made(transport)

        peer = await _open_websocket(
            f"{scheme}://{self.authority.decode()}{target}",
            connected,
            headers,
            subprotocols,
            tls=None if self.tls is None else self.tls(),
            server_hostname=None if self.tls is None else self.host if self.id is None else SERVER_NAME,
            connection=None if self.id is None else Verified,
        )
        notice_loss(peer.transport)
        return peer


async def _open_websocket(
    url: str,
    connected: socket.socket,
    headers: list[tuple[str, str]],
    subprotocols: list[str],
    *,
    tls: ssl.SSLContext | None = None,
    server_hostname: str | None = None,
    connection: type[ClientConnection] | None = None,
) -> ClientConnection:
    from websockets.asyncio.client import ClientConnection as Connection
    from websockets.asyncio.client import connect as dial
    from websockets.typing import Subprotocol

    return await dial(
        url,
        create_connection=connection or Connection,
        sock=connected,
        ssl=tls,
        server_hostname=server_hostname,
        additional_headers=headers,
        subprotocols=[Subprotocol(each) for each in subprotocols] or None,
        compression=None,
        open_timeout=None,
        ping_interval=None,
        close_timeout=5,
        max_size=MAX_MESSAGE,
        max_queue=4,
        proxy=None,
        user_agent_header=None,
    )


def unreachable(node: str, what: str, *, seconds: float = 1.0, hint: str | None = None) -> NodeUnreachable:
    """Return the error for a server that does not answer; the same request may succeed after `seconds`."""
    return NodeUnreachable(
        f"server '{node}' {what}",
        hint=hint or "ask again: another server takes the session over once that server's lease has ended",
        node=node,
        retry=True,
        retry_after=max(1, round(seconds + 0.5)),
    )


class Peer:
    """The connections to one process of one server."""

    def __init__(self, record: NodeRecord, identity: NodeIdentity | None):
        assert record.url is not None
        self.record = record
        self.link: NodeLink = link_to(record.url, record.name, identity)
        self._idle: list[tuple[HttpWire, float]] = []
        self._open: set[HttpWire] = set()
        self._sockets: set[ClientConnection] = set()

    def lost(self, why: str) -> NodeUnreachable:
        """Return the error for a request that this server has got, and whose answer is not complete."""
        hint = "what was asked for may have been done; see, and ask again"
        return unreachable(self.record.name, why, hint=hint)

    async def wire(self) -> HttpWire:
        fresh = time.monotonic() - IDLE_S
        while self._idle:
            wire, since = self._idle.pop()
            if since > fresh and not wire.closed:
                return wire
            self.forget(wire)
            if wire.transport is not None:
                wire.transport.close()
        self._require_room()
        wire = HttpWire(self, self.lost, keeps_headers=True)
        self._open.add(wire)
        try:
            await self.link.connect(lambda: wire)
        except (OSError, TimeoutError):
            self._open.discard(wire)
            raise NotConnected from None
        except BaseException:
            self._open.discard(wire)
            raise
        return wire

    def _require_room(self) -> None:
        if len(self._open) + len(self._sockets) >= MAX_OPEN:
            raise LimitExceeded(
                f"more than {MAX_OPEN} requests are forwarded to server '{self.record.name}' at once",
                hint="wait for some of them to finish",
            )

    async def websocket(self, target: str, headers: list[tuple[str, str]], subprotocols: list[str]) -> ClientConnection:
        self._require_room()
        peer = await self.link.websocket(target, headers, subprotocols)
        self._sockets.add(peer)
        return peer

    def ended(self, socket: ClientConnection) -> None:
        """Close a WebSocket that is not needed any more."""
        self._sockets.discard(socket)
        socket.transport.abort()

    def keep(self, wire: HttpWire) -> None:
        if len(self._idle) >= MAX_IDLE or wire not in self._open:
            self._open.discard(wire)
            if wire.transport is not None:
                wire.transport.close()
        else:
            self._idle.append((wire, time.monotonic()))

    def forget(self, wire: HttpWire) -> None:
        self._open.discard(wire)
        self._idle = [each for each in self._idle if each[0] is not wire]

    def close(self, why: str) -> None:
        self._idle.clear()
        for wire in list(self._open):
            wire.fail(self.lost(why))
        self._open.clear()
        for each in list(self._sockets):
            each.transport.abort()
        self._sockets.clear()


class Peers:
    """The pools of connections to the other servers. `identity` is that of this server, if servers have SPIFFE IDs."""

    def __init__(self, nodes: Nodes, identity: NodeIdentity | None):
        self._nodes = nodes
        self._identity = identity
        self._peers: dict[str, Peer] = {}

    def of(self, record: NodeRecord) -> Peer:
        """Return the pool for a server. What is left of its former process or address is closed."""
        peer = self._peers.get(record.name)
        if peer is None or (peer.record.boot, peer.record.url) != (record.boot, record.url):
            if peer is not None:
                peer.close("was started again")
            peer = self._peers[record.name] = Peer(record, self._identity)
        return peer

    async def close_silent(self) -> None:
        """Close the connections to servers that give no sign of life or are revoked: whoever waits for them is told."""
        for name, peer in list(self._peers.items()):
            if self._nodes.is_silent(peer.record):
                del self._peers[name]
                peer.close("no longer answers")

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close("is no longer asked: this server ends")
        self._peers.clear()
