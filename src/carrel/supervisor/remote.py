"""The supervisor as a program on another machine: reached over TCP with mutual TLS, where no directory can be shared.

A provider starts it in its sandbox with three arguments, and `lent` where a second container lends it the place of
secrets (`carrel.supervisor.lent_directory`). The three are the address and port to listen on, and a file with the
credentials of a slot (`SandboxIdentities.for_slot`, as `Svid.to_json` writes them), which only root of the
sandbox may read. `carrel.providers.remote` has the other side:

1. It listens with these credentials, and accepts servers of its trust domain (`…/carrel/node/*`) and nobody else. The
   sandbox is nobody's yet, and no code of an agent runs.
2. `give_facts` connects, and sends the facts and the credentials of the sandbox. The first server that does has it. It
   becomes the agent, forgets the credentials of the slot, and says that it is ready, or why not.
3. From then on it is `…/carrel/sandbox/<id>`, and answers HTTP at the same port: a `RemoteLink` is how
   `SupervisorConnection` reaches it. `PUT /identity` renews its credentials, and names servers that it refuses. A
   connection that begins with the first line of `carrel.primitives.relay_line` takes outbound connections instead.

So one file can be shared by all slots of a pool, and every sandbox still has an identity of its own, also a fork.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from carrel.errors import InvalidRequest
from carrel.primitives import tasks
from carrel.primitives.keepalive import notice_loss
from carrel.primitives.relay_line import HELLO
from carrel.primitives.spiffe import SpiffeId, Svid, require_peer, server_context
from carrel.primitives.tls_listener import TlsListener
from carrel.supervisor import app, lent_directory
from carrel.supervisor.egress_lines import EgressLines
from carrel.supervisor.http import HttpConnection, HttpRequest, HttpResponse, HttpRouter, json_response
from carrel.supervisor.program import BACKLOG, MOST_FACTS, READY, ProgramFacts, take_charge

LENT = "lent"
LENGTH = 4
"""The bytes before the first message: its length, most significant byte first."""
MOST_REFUSED = 1000
_FACTS_S = 20.0
"""How long a server may take to send the facts."""
_LAST_WORDS_S = 1.0
_DROPS_S = 10.0
"""How long the rest of a refused request is read and dropped."""


@dataclass(frozen=True)
class _Claim:
    facts: ProgramFacts
    credentials: Svid
    transport: asyncio.Transport


class _Claiming(asyncio.Protocol):
    """A connection to a supervisor that has no owner: it takes one message."""

    def __init__(self, slot: Svid, claimed: asyncio.Future[_Claim]):
        self._slot = SpiffeId.parse(slot.id)
        self._claimed = claimed
        self._data = bytearray()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept a server of the trust domain."""
        assert isinstance(transport, asyncio.Transport)
        try:
            require_peer(transport, lambda peer: _is_node(peer, self._slot.trust_domain))
        except PermissionError:
            return
        self._transport = transport
        self._timer = asyncio.get_running_loop().call_later(_FACTS_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Take the message once it is complete."""
        if self._transport is None or self._claimed.done():
            return
        self._data += data
        length = int.from_bytes(self._data[:LENGTH], "big")
        if length > MOST_FACTS or len(self._data) > LENGTH + length:
            self._refuse(f"the facts of the sandbox have more than {MOST_FACTS} bytes")
        elif len(self._data) == LENGTH + length:
            try:
                claim = _read(bytes(self._data[LENGTH:]), self._transport)
            except (ValueError, TypeError, RecursionError) as error:
                self._refuse(f"{type(error).__name__}: {error}")
            else:
                self._claimed.set_result(claim)
                self._stop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it: another server may come."""
        self._stop()
        self._transport = None

    def _refuse(self, why: str) -> None:
        assert self._transport is not None
        self._transport.write(f"failed: {why[:2000]}".encode())
        self._transport.close()
        self._transport = None

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _read(text: bytes, transport: asyncio.Transport) -> _Claim:
    value: Any = json.loads(text)
    if not isinstance(value, dict) or value.keys() != {"facts", "credentials"} or not isinstance(value["facts"], dict):
        raise ValueError("the message must have facts and credentials")
    return _Claim(ProgramFacts(**value["facts"]), Svid.of(value["credentials"]), transport)


def _is_node(peer: SpiffeId, trust_domain: str) -> bool:
    return peer.trust_domain == trust_domain and peer.node_name is not None


class ServerConnections:
    """The connections of servers to the supervisor of a sandbox, and the credentials that new ones see."""

    def __init__(self, credentials: Svid, connections: set[asyncio.Task[None]]):
        self._id = SpiffeId.parse(credentials.id)
        self._context = server_context(credentials)
        self._connections = connections
        self._refused: frozenset[str] = frozenset()
        self._open: dict[_ServerConnection, SpiffeId] = {}
        self.lines = EgressLines()
        self._running: asyncio.Task[None] | None = None

    async def accept(self, listener: socket.socket, router: HttpRouter) -> None:
        """Accept connections from now on."""
        router.add("PUT", "/identity", self._renew)
        accepting = TlsListener(
            listener, lambda: self._context, lambda: _ServerConnection(router, self._connections, self)
        )
        self._running = asyncio.ensure_future(accepting.run())
        self._running.add_done_callback(lambda _: os._exit(1))  # it only ends by a mistake of ours

    def add(self, connection: _ServerConnection, transport: asyncio.BaseTransport) -> None:
        """Record a connection of a server; `PermissionError` if it is not accepted."""
        self._open[connection] = require_peer(
            transport,
            lambda peer: _is_node(peer, self._id.trust_domain) and str(peer) not in self._refused,
        )

    def remove(self, connection: _ServerConnection) -> None:
        """Forget a connection that is closed."""
        self._open.pop(connection, None)

    async def _renew(self, request: HttpRequest) -> HttpResponse:
        """Use other credentials for new connections, and refuse these servers, also where they are connected."""
        body = await request.json()
        refused = body.get("refused")
        if not isinstance(refused, list) or len(refused) > MOST_REFUSED or not all(isinstance(x, str) for x in refused):
            raise InvalidRequest(f"'refused' must be a list of at most {MOST_REFUSED} IDs", field="refused")
        try:
            credentials = Svid.of(body.get("credentials"))
            if credentials.id != str(self._id):
                raise ValueError("they are of another sandbox")
            self._context = server_context(credentials)
        except ValueError as error:
            raise InvalidRequest(f"the credentials are refused: {error}", field="credentials") from None
        self._refused = frozenset(refused)
        for connection, peer in list(self._open.items()):
            if str(peer) in self._refused:
                connection.abort()
        return json_response({})


class _ServerConnection(HttpConnection):
    """A connection from a server whose SPIFFE ID is accepted."""

    def __init__(self, router: HttpRouter, running: set[asyncio.Task[None]], servers: ServerConnections):
        super().__init__(router, running)
        self._servers = servers
        self._to: asyncio.Transport | None = None
        self._drops = False
        self._first: bytes | None = b""
        """The first bytes, until they are known to be a request."""
        self._line: asyncio.Protocol | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Look at the peer before anything that it sends."""
        try:
            self._servers.add(self, transport)
        except PermissionError:
            self.closed = True
            return
        assert isinstance(transport, asyncio.Transport)
        self._to = transport
        notice_loss(transport)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Read nothing of a peer that is not accepted."""
        if self._line is not None:
            self._line.data_received(data)
            return
        if self.closed or self._drops:
            return
        if self._first is not None:
            data = self._first + data
            if HELLO.startswith(data[: len(HELLO)]):
                self._first = data
                if len(data) >= len(HELLO):
                    self._become_line(data[len(HELLO) :])
                return
            self._first = None
        super().data_received(data)

    def _become_line(self, rest: bytes) -> None:
        """Carry outbound connections from now on, and answer no requests."""
        assert self._to is not None
        self._line = self._servers.lines.add(self._to)
        if rest:
            self._line.data_received(rest)

    def pause_writing(self) -> None:
        """Called by asyncio."""
        super().pause_writing()
        if self._line is not None:
            self._line.pause_writing()

    def resume_writing(self) -> None:
        """Called by asyncio."""
        super().resume_writing()
        if self._line is not None:
            self._line.resume_writing()

    def _end_unread(self) -> None:
        """Drop the rest of the request until the server closes: TCP would drop the answer if this side closed first."""
        if self._to is not None and not self.closed:
            self._drops = True
            self._to.resume_reading()
            asyncio.get_running_loop().call_later(_DROPS_S, self._to.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._servers.remove(self)
        if self._line is not None:
            self._line.connection_lost(exc)
        super().connection_lost(exc)

    def abort(self) -> None:
        """Close it at once."""
        if self._to is not None:
            self._to.abort()


def main(arguments: list[str]) -> None:
    """Become the supervisor of this sandbox. Never returns."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler would end PID 1
        os.chdir("/")
        prepared = app.prepare()
        if arguments[4:] == [LENT]:
            lent_directory.borrow()
        listener = _listen(arguments[1], int(arguments[2]))
        slot = _take(arguments[3])
        claim = prepared.loop.run_until_complete(_claimed(listener, slot))
        _serve(listener, claim, prepared)
        prepared.loop.run_forever()
    except Exception as error:
        os.write(2, f"carrel supervisor: {type(error).__name__}: {error}\n"[:2000].encode())
    finally:
        os._exit(1)


def _take(path: str) -> Svid:
    """Read the credentials of the slot, and remove the file where it can be removed."""
    with open(path, "rb") as file:
        credentials = Svid.from_json(file.read())
    with suppress(OSError):
        os.unlink(path)
    return credentials


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(BACKLOG)
    return listener


def _serve(listener: socket.socket, claim: _Claim, prepared: app.Prepared) -> None:
    """Serve the owner, and say so."""
    try:
        servers = ServerConnections(claim.credentials, set())
        take_charge(claim.facts, prepared, lambda: listener, servers.accept, servers.lines.carry)
    except Exception as error:
        claim.transport.write(f"failed: {type(error).__name__}: {error}"[:2000].encode())
        claim.transport.close()
        prepared.loop.run_until_complete(asyncio.sleep(_LAST_WORDS_S))
        raise
    claim.transport.write(READY)
    claim.transport.close()


async def _claimed(listener: socket.socket, slot: Svid) -> _Claim:
    """Wait for the first server that sends the facts."""
    claimed: asyncio.Future[_Claim] = asyncio.get_running_loop().create_future()
    context = server_context(slot)
    accepting = asyncio.ensure_future(TlsListener(listener, lambda: context, lambda: _Claiming(slot, claimed)).run())
    try:
        return await claimed
    finally:
        await tasks.cancel((accepting,))


if __name__ == "__main__":
    main(sys.argv)
