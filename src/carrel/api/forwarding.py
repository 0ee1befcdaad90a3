"""Forwards requests to the server that has the session: one hop, streams in both directions, nothing buffered.

The table of operations says which requests are about one session or context; no route knows of this. Asks the database
where a session is only when it does not run here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.types import Message, Receive, Scope, Send

from carrel.api.port_visits import FACTS, VISIT
from carrel.api.problems import MOVED_HEADER
from carrel.api.socket_relay import SocketRelay, with_first_message
from carrel.connections import of_scope
from carrel.control.http_wire import MAX_PROBLEM, HttpWire
from carrel.control.nodes.passes import (
    ADMINISTRATOR,
    ANYONE,
    HEADER,
    Forwardable,
    Pass,
    Passes,
    digest_of,
    kept_headers,
)
from carrel.control.nodes.peers import NotConnected, Peer, unreachable
from carrel.control.nodes.placement import Here
from carrel.control.nodes.routing import Routing, elsewhere
from carrel.control.nodes.workers import server_of
from carrel.control.operations.caller import Caller
from carrel.control.sessions.live import LiveSandboxes
from carrel.errors import NodeUnreachable, Unauthorized
from carrel.identity import ROOT, Identity, Tokens
from carrel.metrics import Metrics
from carrel.models.operations import DEPLOY_OR_RESUME, TABLE, ForwardedOperation
from carrel.primitives import tasks
from carrel.tracing import trace_now

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

log = logging.getLogger("carrel.api")

PASS = "carrel.pass"  # noqa: S105 - the key in the ASGI scope
TRIES = 4
GRACE_S, DISCARD_S = 30.0, 2.0
_HOP = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-authenticate", b"te", b"trailer", b"transfer-encoding", b"upgrade",
        b"x-request-id", b"date", b"server",
    }
)  # fmt: skip
"""Headers of an answer that concern one connection, or that the gate of this server adds."""
_OF_CONNECTION = frozenset(
    {
        b"host", b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"te", b"trailer", b"upgrade",
        b"expect", b"proxy-authorization", b"proxy-connection", b"http2-settings", HEADER,
    }
)  # fmt: skip
"""Headers of a request to a port that concern one connection."""
ANSWERED_BY = b"carrel-answered-by"
"""A header of the answers of servers in sandboxes. Nothing in them is an answer of carrel's."""
_REPLACED = frozenset({b"x-request-id", b"traceparent", b"tracestate"})
"""Headers of a request whose values this server has checked, or makes."""


def _prefixes() -> str:
    """Return the beginnings of the paths of all operations on one session or context."""
    found = (re.match(r"(/v1/[a-z-]+/){(?:id|context_id)}", row.path) for row in TABLE)
    return "|".join(sorted({re.escape(each[1]) for each in found if each}))


_NAMED = re.compile(f"(?:{_prefixes()})([^/]+)")
_FINITE = [
    (row.method, re.compile(re.sub(r"{\w+}", "[^/]+", row.path)), row.deadline)
    for row in TABLE
    if isinstance(row, ForwardedOperation)
]
"""The operations whose answer has a deadline."""


_METHODS = frozenset(row.method for row in TABLE)


@dataclass(frozen=True, slots=True)
class Subject:
    """The session or context that a request is about. `starts`: it gets or creates a sandbox, and the body names the
    context. `readable`: it reads the record of the session, which any server can.
    """

    name: str = ""
    starts: bool = False
    readable: bool = False


@dataclass(slots=True)
class _Body:
    """The body of a request: all of it, or the first piece and the rest to come."""

    first: bytes
    more: bool
    receive: Receive
    length: bytes | None
    sends: bool
    """Whether the method has a body."""
    streams: bool
    """Whether its route reads it as it comes."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the caller has sent all of it."""
    begun: bool = False
    """Whether a part of it was sent on."""
    forwarded: bool = False
    """Whether all of it was sent on."""
    gone: bool = False
    """Whether the caller has gone."""

    @classmethod
    async def begin(cls, scope: Scope, receive: Receive, *, streams: bool) -> _Body | None:
        """Read the first piece; None if the caller has gone."""
        length = next((value for name, value in scope["headers"] if name == b"content-length"), None)
        if scope["type"] != "http" or scope["method"] not in {"POST", "PUT", "PATCH", "DELETE"}:
            return cls(b"", False, receive, None, False, False)
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        return cls(message.get("body", b""), message.get("more_body", False), receive, length, True, streams)

    def again(self) -> Receive:
        """Return a `receive` that begins with the piece that was read."""
        given = not self.sends

        async def messages() -> Message:
            nonlocal given
            if given:
                return await self.receive()
            given = True
            return {"type": "http.request", "body": self.first, "more_body": self.more}

        return messages

    @property
    def described(self) -> str:
        if not self.sends:
            return "none"
        if not self.more:
            return f"length {len(self.first)}" if self.streams else digest_of(self.first)
        return "stream" if self.length is None else f"length {self.length.decode('latin-1')}"


_STARTS = frozenset({"http.response.start", "websocket.http.response.start"})

Run = Callable[[Receive, Send], Awaitable[None]]
"""Answers a request on this server."""


class Forwarding:
    """Decides for each request whether this server answers it, and forwards it if not."""

    def __init__(
        self,
        routing: Routing,
        passes: Passes,
        live: LiveSandboxes,
        tokens: Tokens,
        metrics: Metrics,
        *,
        authenticated: bool,
        verified: bool,
    ):
        """`verified`: servers have SPIFFE IDs."""
        self._verified = verified
        self._metrics = metrics
        self._routing = routing
        self._passes = passes
        self._live = live
        self._tokens = tokens
        self._authenticated = authenticated

    # which requests

    def elsewhere(self, scope: Scope) -> Subject | None:
        """Return what a request is about unless this server answers it in any case."""
        path = scope["path"]
        if path == DEPLOY_OR_RESUME.path:
            return Subject(starts=True) if scope.get("method") == DEPLOY_OR_RESUME.method else None
        found = _NAMED.match(path)
        if found is None or self._live.find(found[1]) is not None:
            return None
        if scope.get("method", "GET") not in _METHODS and VISIT not in scope:
            return None
        return Subject(found[1], readable=found.end() == len(path) and scope.get("method") == "GET")

    # on the server that is asked by another

    async def identify(self, scope: Scope, value: bytes) -> tuple[Identity, Pass]:
        """Return the caller of a forwarded request; `Unauthorized`."""
        request = Forwardable(scope.get("method", "GET"), target_of(scope), _kept(scope), "")
        passed = self._passes.check(value, request)
        connection = of_scope(scope)
        of_worker = connection is not None and connection.is_local and self._routing.is_worker(passed.sender)
        if (
            self._verified
            and not of_worker
            and not (
                connection is not None and connection.node is not None and connection.node == server_of(passed.sender)
            )
        ):
            raise Unauthorized(
                "requests are forwarded with mutual TLS only, by the server that signs the pass",
                field="Carrel-Forwarded",
                hint="give all servers of the database the same CARREL_SPIFFE_SOURCE",
            )
        if self._verified and not of_worker:
            await self._routing.require_member(passed.sender)
        if passed.caller == ANYONE:
            if self._authenticated:
                raise Unauthorized(
                    "a server that needs no token forwarded this request, and this server needs one",
                    field="Carrel-Forwarded",
                    hint="give all servers of the database the same setting `auth`",
                )
            return ROOT, passed
        if not self._authenticated or passed.caller == ADMINISTRATOR:
            return ROOT, passed
        return await self._tokens.of_id(passed.caller), passed

    # answering

    async def serve(
        self,
        subject: Subject,
        scope: Scope,
        receive: Receive,
        send: Send,
        caller: Caller,
        run: Run,
        read: Callable[[Receive], Awaitable[bytes | None]],
        *,
        streams: bool,
    ) -> None:
        """Answer a request here with `run`, or on the server where its session is. `read` returns a whole body;
        `streams`: the route reads the body as it comes.
        """
        begun = await self._begin(subject, scope, receive, read, streams=streams)
        if begun is None:
            return
        body, document = begun
        passed: Pass | None = scope.get(PASS)
        asked, again = self._routing.name, False
        for _ in range(TRIES):
            if subject.starts:
                place = await self._routing.start(document, forwarded=passed is not None)
            else:
                place = await self._routing.find(subject.name, forwarded=passed is not None, readable=subject.readable)
            if isinstance(place, Here):
                moves = _Moves(send)
                with self._routing.starting() if subject.starts else nullcontext():
                    await run(with_first_message(scope, body.again()), moves if passed is None else send)
                if moves.owner is None:
                    return
                asked = moves.owner or asked
                if again or body.more:
                    break  # no other server can do more, or a part of the body is gone
                again = True
            elif passed is not None:  # one hop: the sender finds the owner
                raise elsewhere(place.node, "it was just forwarded from there" if place.node == passed.sender else "")
            else:
                if await self._asked(place.node, scope, body, send, caller):
                    return
                asked = place.node
            self._routing.forget(subject.name)
            if body.begun and body.more:
                break  # a part of it was sent, and is not kept
            await self._routing.refresh()
        raise unreachable(asked, "does not take this request now: its session may be on its way", hint="ask again")

    async def _begin(
        self,
        subject: Subject,
        scope: Scope,
        receive: Receive,
        read: Callable[[Receive], Awaitable[bytes | None]],
        *,
        streams: bool,
    ) -> tuple[_Body, dict[str, Any]] | None:
        if not subject.starts:
            body = await _Body.begin(scope, receive, streams=streams)
            return None if body is None else (body, {})
        whole = await read(receive)
        if whole is None:
            return None
        try:
            document = json.loads(whole)
        except (ValueError, RecursionError):
            document = {}
        return _Body(whole, False, receive, b"%d" % len(whole), True, False), document if isinstance(
            document, dict
        ) else {}

    # asking the other server

    async def _asked(self, node: str, scope: Scope, body: _Body, send: Send, caller: Caller) -> bool:
        """Let another server answer; False if it did nothing, and a place has to be found anew."""
        peer = await self._routing.peer(node)
        if peer is None:
            return False
        try:
            if scope["type"] == "websocket":
                dial = partial(self._websocket, peer, scope, caller)
                answered = await SocketRelay(peer, dial, scope, body.receive, send).run()
            else:
                answered = await self._answered(peer, scope, body, send, caller)
        except NotConnected:
            log.warning("server '%s' could not be reached at %s", node, peer.record.url)
            self._metrics.forwarded("not_connected")
            self._routing.suspect(peer)
            return False
        except NodeUnreachable:
            if not body.gone:
                self._metrics.forwarded("lost")
            raise
        self._metrics.forwarded("answered" if answered else "refused")
        return answered

    def _headers(self, peer: Peer, scope: Scope, described: str, caller: Caller) -> list[tuple[bytes, bytes]]:
        """Return the headers of a forwarded request, with its pass."""
        headers = [pair for pair in _kept(scope) if pair[0] not in _REPLACED]
        if (visit := scope.get(VISIT)) is not None:
            headers.append((FACTS, visit.facts()))
        headers.append((b"x-request-id", (caller.request_id or "").encode()))
        if (trace := trace_now(caller.trace)) is not None:
            headers += trace.headers()
        request = Forwardable(scope.get("method", "GET"), target_of(scope), headers, described)
        who = ANYONE
        if self._authenticated:
            assert caller.identity is ROOT or caller.identity.token_id
            who = caller.identity.token_id or ADMINISTRATOR
        return [*headers, (HEADER, self._passes.make(request, who, peer.record.name, peer.record.boot))]

    async def _answered(self, peer: Peer, scope: Scope, body: _Body, send: Send, caller: Caller) -> bool:
        wire = await peer.wire()
        wire.begin(0, bodiless=scope["method"] == "HEAD")
        feeding: asyncio.Task[None] | None = None
        try:
            transport = wire.transport
            assert transport is not None
            lines = [scope["method"].encode(), b" ", target_of(scope), b" HTTP/1.1\r\nhost: ", peer.link.authority]
            for name, value in self._headers(peer, scope, body.described, caller):
                lines += (b"\r\n", name, b": ", value)
            if body.sends:
                if not body.more:
                    lines.append(b"\r\ncontent-length: %d" % len(body.first))
                elif body.length is not None:
                    lines += (b"\r\ncontent-length: ", body.length)
                else:
                    lines.append(b"\r\ntransfer-encoding: chunked")
            chunked = body.more and body.length is None
            first = b"%x\r\n%s\r\n" % (len(body.first), body.first) if chunked and body.first else body.first
            body.begun = True
            transport.write(b"".join((*lines, b"\r\n\r\n", first)))
            feeding = asyncio.ensure_future(_feed(wire, body, chunked=chunked))
            try:
                await wire.head(_deadline(scope))
            except NodeUnreachable:
                if scope["method"] != "GET" or body.gone:
                    raise
                return False  # it may have been restarted, and reading twice does no harm
            return await self._relay(wire, body, send)
        finally:
            if feeding is not None:
                await tasks.cancel([feeding])
            if body.more and not body.forwarded and wire.transport is not None:
                wire.closed = True  # the rest of the body was not sent: this connection cannot be used again
                wire.transport.abort()
            wire.release()

    async def _relay(self, wire: HttpWire, body: _Body, send: Send) -> bool:
        """Pass an answer on; False for one that says that nothing was done."""
        headers = [pair for pair in wire.headers if pair[0] not in _HOP and pair[0] != MOVED_HEADER.encode()]
        by_sandbox = any(name == ANSWERED_BY for name, _ in wire.headers)
        if wire.status in {401, 409} and not by_sandbox and await _did_nothing(wire):
            return False
        if body.more and not body.ended.is_set():
            # A caller that is cut off while it sends would not see the answer.
            with suppress(TimeoutError):
                await asyncio.wait_for(body.ended.wait(), DISCARD_S)
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": wire.status, "headers": headers})
        if not wire.complete:
            async for chunk in wire.body(None):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            await send({"type": "http.response.body", "body": b"".join(wire.chunks), "more_body": False})
            wire.chunks.clear()
        return True

    async def _websocket(self, peer: Peer, scope: Scope, caller: Caller) -> ClientConnection:
        """Open a WebSocket to another server."""
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in self._headers(peer, scope, "none", caller)
        ]
        offered = [each for each in scope.get("subprotocols", []) if not each.startswith("carrel.token.")]
        return await peer.websocket(target_of(scope).decode("latin-1"), headers, offered)


async def _feed(wire: HttpWire, body: _Body, *, chunked: bool) -> None:
    """Send the rest of a body, then wait for the caller to go. What comes after an early answer is dropped."""
    more, transport = body.more, wire.transport
    assert transport is not None
    while True:
        if more:
            await wire.drain(None)
        message = await body.receive()
        if message["type"] == "http.disconnect":
            body.gone = True
            body.ended.set()
            wire.fail(NodeUnreachable("the caller has gone"))
            return
        if not more:
            continue
        data, more = message.get("body", b""), message.get("more_body", False)
        open_yet = not wire.complete and not wire.closed
        if data and open_yet:
            transport.write(b"%x\r\n%s\r\n" % (len(data), data) if chunked else data)
        if not more:
            if chunked and open_yet:
                transport.write(b"0\r\n\r\n")
            body.forwarded = open_yet
            body.ended.set()


async def _did_nothing(wire: HttpWire) -> bool:
    """Whether a refusal says that the other server is not the owner, or does not accept the pass."""
    moved = any(name == MOVED_HEADER.encode() for name, _ in wire.headers)
    if wire.status == 409:
        if moved:
            await _rest(wire)
        return moved
    problem = await _rest(wire)
    try:
        value = json.loads(problem)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and value.get("field") == "Carrel-Forwarded"


async def _rest(wire: HttpWire) -> bytes:
    """Wait for a short body, and leave it in place."""
    while not wire.complete and wire.failure is None and wire.buffered <= MAX_PROBLEM:
        await wire.wait(GRACE_S)
    if wire.failure is not None:
        raise wire.failure
    return b"".join(wire.chunks)


class _Moves:
    """A `send` that holds an answer `runs_elsewhere` back: it is for servers, and callers never see it."""

    def __init__(self, send: Send):
        self._send = send
        self.owner: str | None = None
        """The server that the answer names."""

    async def __call__(self, message: Message) -> None:
        if message["type"] in _STARTS and message["status"] == 409:
            found = [value for name, value in message.get("headers", ()) if name == MOVED_HEADER.encode()]
            self.owner = found[0].decode("latin-1") if found else None
        if self.owner is None:
            await self._send(message)


def _kept(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Return the headers of a request that travel with it: to a server in a sandbox nearly all."""
    if VISIT not in scope:
        return kept_headers(scope["headers"])
    return [
        pair for pair in scope["headers"] if pair[0] not in _OF_CONNECTION and not pair[0].startswith(b"sec-websocket-")
    ]


def target_of(scope: Scope) -> bytes:
    """Return the path and query of a request as they were sent."""
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    return path + b"?" + query if query else path


def _deadline(scope: Scope) -> float | None:
    """Return how long the answer of another server may take to begin; None if only its life limits it: a command may
    run for as long as its caller wants.
    """
    for method, path, seconds in _FINITE:
        if method == scope["method"] and path.fullmatch(scope["path"]):
            waits = next((value for name, value in scope["headers"] if name == b"carrel-wait"), b"0")
            return seconds + GRACE_S + float(waits)
    return None
