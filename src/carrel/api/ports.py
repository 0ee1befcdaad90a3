"""Ports of sandboxes: which are open, URLs for them, and the requests to the servers behind them.

A request to a port comes here with its credentials removed (`carrel.api.port_visits`). HTTP and WebSockets are read and
written anew on both sides, so neither side can send anything that the other reads as another message. Any other TCP
goes through `…/ports/{port}` as a WebSocket: binary messages are bytes, an empty one ends a direction.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from carrel.api.forwarding import ANSWERED_BY
from carrel.api.guard import GuardedRouter, permit
from carrel.api.parameters import Path
from carrel.api.parts import CALLER, Plane, SandboxId, Who, as_json, body_of, caller_of, plane_of, query_of
from carrel.api.port_visits import VISIT, PortVisit, send_page, wants_page
from carrel.api.terminals import close_with
from carrel.control.operations.call import Traffic
from carrel.control.operations.caller import Caller
from carrel.control.plane import ControlPlane
from carrel.control.ports import headers
from carrel.control.ports.exchange import PortExchange
from carrel.control.ports.sockets import PortSocket, SocketRefused
from carrel.control.supervisor.connection import SupervisorStream
from carrel.errors import CarrelError, Denied, InvalidRequest, NotFound, RunsElsewhere, Unauthorized
from carrel.models import PortList, PortUrl, ShareRequest
from carrel.models.operations import CLOSE_PORT, FORWARD_PORT, LIST_PORTS, REACH_PORT, SHARE_PORT, VISIT_PORT, Operation
from carrel.models.ports import MAX_PORT_WAIT_S
from carrel.primitives import tasks

router = GuardedRouter(tags=["ports"])

METHODS = frozenset({"GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"})
ANSWERED = (ANSWERED_BY, b"sandbox")
"""Marks an answer of a server in a sandbox: any other is carrel's own."""
STALL_S = 300.0
"""How long a visitor may send or read nothing while the server waits for it."""
SOCKET_IDLE_S = 1800.0
"""How long a WebSocket or a tunnel may carry nothing: a forgotten one must not keep a sandbox from stopping."""
_BODIES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_SUBPROTOCOL = "carrel.tcp"

PortNumber = Annotated[int, Path(alias="port", ge=1, le=65_535, description="a port of the sandbox")]


class PortQuery(BaseModel):
    """The query of the route that lists ports."""

    model_config = ConfigDict(defer_build=True)

    port: int | None = Field(default=None, ge=1, le=65_535, description="wait until this port is open")
    wait_s: float = Field(default=0.0, ge=0, le=MAX_PORT_WAIT_S, description="seconds to wait for it")


@router.operation(LIST_PORTS, "The open ports of a sandbox", PortList, 404, 409, 422, 502, queries=PortQuery)
async def list_ports(request: Request) -> Response:
    """The ports on which a server listens in the sandbox. With `port` and `wait_s` the answer waits until that one is
    open.
    """
    asked, name = query_of(request, PortQuery), request.path_params["id"]
    found = await plane_of(request).ports.list(caller_of(request), name, port=asked.port, wait_s=asked.wait_s)
    return as_json(found)


@router.operation(SHARE_PORT, "Make a URL of a port", PortUrl, 404, 409, 413, 422, parses=ShareRequest)
async def share_port(request: Request) -> Response:
    """The URL expires, and is invalid when the token that made it is revoked. A `public` port needs no access, and
    stays public until it is closed. The server need not listen yet, and the sandbox may be stopped meanwhile.
    """
    body = await body_of(request, ShareRequest)
    return as_json(await plane_of(request).ports.share(caller_of(request), request.path_params["id"], body))


@router.operation(CLOSE_PORT, "Make a public port private", None, 404, 409)
async def close_port(id: SandboxId, port: PortNumber, plane: Plane, caller: Who) -> Response:
    """May be repeated. URLs that expire stay valid."""
    await plane.ports.close(caller, id, port)
    return Response(status_code=204)


class PortRoute(Route):
    """The route of the requests to a port: HTTP with any method, and WebSockets."""

    def __init__(self, row: Operation):
        super().__init__(row.path, _never, name=row.id)
        self.row = row

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match what the gate has recognized, and nothing else."""
        visit: PortVisit | None = scope.get(VISIT)
        if visit is None:
            return Match.NONE, {}
        return Match.FULL, {"path_params": {"id": visit.sandbox, "port": visit.port}, "route": self}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the caller's token, and pass the request on."""
        caller: Caller = scope[CALLER]
        await permit(caller, self.row, scope)
        visit: PortVisit = scope[VISIT]
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            async with _until(visit.expires_at):
                if scope["type"] == "websocket":
                    await _pass_socket(scope, receive, send, caller, visit)
                else:
                    await _pass_request(scope, receive, watched, caller, visit)
        except RunsElsewhere:
            raise  # for another server
        except CarrelError as error:
            if started or not wants_page(scope):
                raise
            await send_page(error, send)


async def _never(_request: Request) -> Response:
    raise NotFound("there is no such resource")


router.routes.append(PortRoute(REACH_PORT))  # type: ignore[arg-type]


@asynccontextmanager
async def _until(expires_at: float | None) -> AsyncIterator[None]:
    """End what a URL began when the URL expires."""
    if expires_at is None:
        yield
        return
    try:
        async with asyncio.timeout(expires_at - time.time()):
            yield
    except TimeoutError:
        raise Unauthorized("this URL of a port has expired", field="Carrel-Access", hint="ask for a new one") from None


def _reaching(plane: ControlPlane, caller: Caller, visit: PortVisit, protocol: str):  # type: ignore[no-untyped-def]
    row = REACH_PORT if visit.by == "token" else VISIT_PORT
    return plane.ports.reach(caller, visit.sandbox, visit.port, row, protocol=protocol, wake=visit.wake)


def _seen_host(visit: PortVisit) -> str:
    """Return what the server sees as its own host: many accept only their own name."""
    return visit.public if visit.by_host else f"localhost:{visit.port}"


def _inward(scope: Scope, visit: PortVisit) -> headers.Headers:
    given = scope["headers"] if visit.by_host else [pair for pair in scope["headers"] if pair[0] != b"origin"]
    return headers.inward(
        given,
        host=_seen_host(visit).encode("latin-1"),
        public=visit.public.encode("latin-1"),
        scheme=visit.scheme.encode(),
        prefix=visit.prefix.encode("latin-1"),
    )


# HTTP


async def _pass_request(scope: Scope, receive: Receive, send: Send, caller: Caller, visit: PortVisit) -> None:
    if scope["method"] not in METHODS:
        raise InvalidRequest(
            f"the method {scope['method'][:20]} is not passed on",
            field="method",
            hint=f"use {', '.join(sorted(METHODS))}",
        )
    if not visit.by_host and any(name == b"service-worker" for name, _ in scope["headers"]):
        raise Denied("a page by path has no service worker", field="Service-Worker", hint="use the host of the port")
    if visit.in_query and visit.by_host and wants_page(scope):
        await _with_cookie(scope, send, visit)
        return
    async with _reaching(scope["app"].state.plane, caller, visit, "http") as (stream, traffic):
        await _HttpPassage(scope, receive, send, visit, stream, traffic).run()


async def _with_cookie(scope: Scope, send: Send, visit: PortVisit) -> None:
    """Give a browser the access as a cookie, and send it to the address without it."""
    secure = visit.scheme == "https"
    name = headers.SECURE_COOKIE if secure else headers.COOKIE
    cookie = f"{name}={visit.shown}; Path=/; HttpOnly; SameSite=Lax{'; Secure' if secure else ''}"
    if visit.expires_at is not None:
        cookie += f"; Max-Age={max(1, int(visit.expires_at - time.time()))}"
    # One leading slash: two would name another host.
    target = b"/" + visit.target.lstrip(b"/\\")
    told = [
        (b"location", target),
        (b"set-cookie", cookie.encode("latin-1")),
        (b"cache-control", b"no-store"),
        (b"referrer-policy", b"no-referrer"),
        (b"content-length", b"0"),
    ]
    await send({"type": "http.response.start", "status": 303, "headers": told})
    await send({"type": "http.response.body", "body": b""})


class _HttpPassage:
    """One HTTP request to a port, and its answer."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, visit: PortVisit, stream: SupervisorStream, traffic: Traffic
    ):
        self._scope = scope
        self._receive = receive
        self._send = send
        self._visit = visit
        self._traffic = traffic
        self._exchange = PortExchange(stream, visit.port)
        self._sent = False
        """Whether the visitor has sent its whole request."""

    async def run(self) -> None:
        """Pass both directions on until the answer ends or the visitor goes."""
        given = _inward(self._scope, self._visit)
        sends = self._scope["method"] in _BODIES
        if sends:
            given += _framing(self._scope)
        await self._exchange.send_head(self._scope["method"], self._visit.target, given)
        sending = asyncio.ensure_future(self._requesting(sends))
        answering = asyncio.ensure_future(self._answering())
        try:
            await asyncio.wait({sending, answering}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()  # the visitor has gone, unless it stalled
        finally:
            await tasks.cancel([sending, answering])
        if not answering.cancelled():
            answering.result()

    async def _requesting(self, sends: bool) -> None:
        """Pass the body on, then wait for the visitor to go."""
        if not sends:
            await self._exchange.end_body()
            self._sent = True
        while True:
            message = await self._next(self._sent)
            if message["type"] == "http.disconnect":
                return
            if self._sent:
                continue
            if data := message.get("body", b""):
                self._traffic.count_in(len(data))
                await self._exchange.send_body(data)
            if not message.get("more_body", False):
                await self._exchange.end_body()
                self._sent = True

    async def _next(self, ended: bool) -> Message:
        if ended:
            return await self._receive()
        try:
            async with asyncio.timeout(STALL_S):
                return await self._receive()
        except TimeoutError:
            raise InvalidRequest("the body did not arrive in time", field="body", hint="send it again") from None

    async def _answering(self) -> None:
        exchange, visit = self._exchange, self._visit
        await exchange.head()
        prefix = b"" if visit.by_host else visit.prefix.encode("latin-1")
        kept = headers.outward(exchange.headers, by_host=visit.by_host, port=visit.port, prefix=prefix)
        if exchange.status in {204, 304}:
            kept = [pair for pair in kept if pair[0] != b"content-length"]
        if not self._sent:  # the rest of the body could be taken for the next request
            kept.append((b"connection", b"close"))
        await self._out({"type": "http.response.start", "status": exchange.status, "headers": [*kept, ANSWERED]})
        async for data in exchange.body():
            self._traffic.count_out(len(data))
            await self._out({"type": "http.response.body", "body": data, "more_body": True})
        await self._out({"type": "http.response.body", "body": b"", "more_body": False})

    async def _out(self, message: Message) -> None:
        try:
            async with asyncio.timeout(STALL_S):
                await self._send(message)
        except TimeoutError:
            raise InvalidRequest("the answer was not read in time", field="body", hint="ask again") from None


def _framing(scope: Scope) -> headers.Headers:
    """Return the header that says how long the body is; the server of this API has checked it."""
    length = next((value for name, value in scope["headers"] if name == b"content-length"), None)
    return [(b"transfer-encoding", b"chunked")] if length is None else [(b"content-length", length)]


# WebSockets


class _Gone(Exception):
    """One side has ended: the other tasks end too."""


async def _pass_socket(scope: Scope, receive: Receive, send: Send, caller: Caller, visit: PortVisit) -> None:
    socket = WebSocket(scope, receive, send)
    async with _reaching(scope["app"].state.plane, caller, visit, "websocket") as (stream, traffic):
        inner = PortSocket(stream, visit.port)
        given = [pair for pair in _inward(scope, visit) if pair[0] != b"host"]
        offered = list(scope.get("subprotocols", []))
        try:
            await inner.open(visit.target.decode("latin-1"), _seen_host(visit), given, offered)
        except SocketRefused as refused:
            await _refuse_socket(scope, receive, send, visit, refused)
            return
        await socket.accept(inner.subprotocol)
        await _both(
            socket,
            lambda busy: _from_visitor(socket, inner, traffic, busy),
            lambda busy: _to_visitor(socket, inner, traffic, busy),
        )


async def _refuse_socket(scope: Scope, receive: Receive, send: Send, visit: PortVisit, refused: SocketRefused) -> None:
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008})
        return
    prefix = b"" if visit.by_host else visit.prefix.encode("latin-1")
    kept = headers.outward(refused.headers, by_host=visit.by_host, port=visit.port, prefix=prefix)
    kept = [pair for pair in kept if pair[0] != b"content-length"]
    kept += [(b"content-length", b"%d" % len(refused.body)), ANSWERED]
    await receive()  # `websocket.connect`
    await send({"type": "websocket.http.response.start", "status": refused.status, "headers": kept})
    await send({"type": "websocket.http.response.body", "body": refused.body})


class _Busy:
    """When something was carried last."""

    def __init__(self) -> None:
        self.at = time.monotonic()

    def touch(self) -> None:
        self.at = time.monotonic()

    async def idle(self) -> None:
        """Raise `InvalidRequest` once nothing has been carried for `SOCKET_IDLE_S`."""
        left = SOCKET_IDLE_S
        while left > 0:
            await asyncio.sleep(left)
            left = self.at + SOCKET_IDLE_S - time.monotonic()
        raise InvalidRequest("nothing was sent for long", field="socket", hint="connect again")


async def _both(socket: WebSocket, inward, outward) -> None:  # type: ignore[no-untyped-def]
    busy = _Busy()
    try:
        async with asyncio.TaskGroup() as group:
            for each in (inward(busy), outward(busy), busy.idle()):
                group.create_task(each)
    except* (_Gone, WebSocketDisconnect):
        pass
    except* CarrelError as errors:
        await close_with(socket, errors.exceptions[0])


async def _from_visitor(socket: WebSocket, inner: PortSocket, traffic: Traffic, busy: _Busy) -> None:
    while True:
        message = await socket.receive()
        busy.touch()
        if message["type"] == "websocket.disconnect":
            await inner.close(message.get("code") or 1000, message.get("reason") or "")
            raise _Gone
        data = message.get("bytes")
        given: str | bytes = data if data is not None else message.get("text") or ""
        traffic.count_in(len(given))
        await inner.send(given)


async def _to_visitor(socket: WebSocket, inner: PortSocket, traffic: Traffic, busy: _Busy) -> None:
    while (message := await inner.recv()) is not None:
        busy.touch()
        traffic.count_out(len(message))
        if isinstance(message, str):
            await socket.send_text(message)
        else:
            await socket.send_bytes(message)
    code = (
        inner.close_code if inner.close_code not in {1005, 1006, 1015} else 1000 if inner.close_code == 1005 else 1011
    )
    with suppress(RuntimeError):
        await socket.close(code, inner.close_reason)
    raise _Gone


# any TCP


@router.socket(FORWARD_PORT)
async def forward_port(socket: WebSocket) -> None:
    """Connect to a port. A refusal is a problem answer, before the WebSocket is accepted."""
    caller = caller_of(socket)
    await permit(caller, FORWARD_PORT, socket.scope)
    id, port = socket.path_params["id"], socket.path_params["port"]
    if not (port.isascii() and port.isdigit() and 0 < int(port[:6]) <= 65_535):
        raise InvalidRequest("a port is a number from 1 to 65535", field="port")
    reached = plane_of(socket).ports.reach(caller, id, int(port), FORWARD_PORT, protocol="tcp")
    async with reached as (stream, traffic):
        await socket.accept(_SUBPROTOCOL if _SUBPROTOCOL in socket.scope.get("subprotocols", []) else None)
        await _both(
            socket,
            lambda busy: _bytes_in(socket, stream, traffic, busy),
            lambda busy: _bytes_out(socket, stream, traffic, busy),
        )


async def _bytes_in(socket: WebSocket, stream: SupervisorStream, traffic: Traffic, busy: _Busy) -> None:
    ended = False
    while True:
        message = await socket.receive()
        busy.touch()
        if message["type"] == "websocket.disconnect":
            raise _Gone
        data = message.get("bytes")
        if data is None:
            raise InvalidRequest("a tunnel has binary messages only", field="socket", hint="an empty one ends it")
        if ended:
            continue
        if data:
            traffic.count_in(len(data))
            await stream.write(data)
        else:
            ended = True
            stream.end()


async def _bytes_out(socket: WebSocket, stream: SupervisorStream, traffic: Traffic, busy: _Busy) -> None:
    while data := await stream.read():
        busy.touch()
        traffic.count_out(len(data))
        await socket.send_bytes(data)
    await socket.send_bytes(b"")
    await socket.close(1000)
    raise _Gone
