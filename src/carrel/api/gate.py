"""The gate that every request passes first: the Host check, the token, the size of the body, and the handler of
unexpected failures. It sets `caller`.

Plain ASGI, because every command passes it. Knows only the routes that need no token or stream their body.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import cast
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from carrel.api.e2b.inner import IDENTIFIED
from carrel.api.forwarding import PASS, Forwarding
from carrel.api.parts import CALLER
from carrel.api.port_visits import VISIT, PortVisit, PortVisits, send_page, wants_page
from carrel.api.problems import MEDIA_TYPE, UNEXPECTED, encode, headers_of
from carrel.connections import mark_authenticated, of_scope, replay
from carrel.control.governance.open_requests import OpenRequest, OpenRequests
from carrel.control.nodes.passes import HEADER, require_body, require_length
from carrel.control.nodes.workers import OtherWorkers
from carrel.control.operations.caller import Caller
from carrel.control.ports.access import looks_like_one
from carrel.control.ports.ports import Ports, Visitor
from carrel.errors import CarrelError, InvalidRequest, TooLarge, Unauthorized
from carrel.identity import ROOT, Identity, Tokens
from carrel.primitives import tasks
from carrel.tracing import Span, Tracing, current, trace_of

log = logging.getLogger("carrel.api")

Redact = Callable[[str | None, str], Awaitable[str]]
"""Removes the secrets of a context or a sandbox from a text."""

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/docs", "/openapi.json"})
UNTRACED = OPEN_PATHS | {"/metrics"}
STREAMED = {
    "PUT": re.compile(r"/v1/(sandboxes/[^/]+/files|filespaces/[^/]+)/content"),
    "POST": re.compile(r"/v1/((sandboxes/[^/]+/files|execute)/bundle|images/(import|build))"),
}
SUBPROTOCOL = "carrel"
TOKEN_SUBPROTOCOL = b"carrel.token."
_MAX_DISCARD, _MAX_DISCARD_S = 64 * 1024 * 1024, 2.0
_BODY_METHODS = frozenset({"POST", "PUT", "PATCH", "DELETE"})
MAX_WAIT_S = 600.0
_WANTED = frozenset(
    {
        b"authorization", b"host", b"origin", b"content-length", b"sec-websocket-protocol",
        b"carrel-approval", b"carrel-wait", b"x-request-id", b"traceparent", b"tracestate", HEADER,
    }
)  # fmt: skip
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_APPROVAL = re.compile(rb"[A-Za-z0-9-]{1,64}")


def _host_of(value: bytes) -> str:
    text = value.decode("latin-1").strip().lower()
    if text.startswith("["):
        return text.partition("]")[0] + "]"
    return text.partition(":")[0]


def _origin_host(value: bytes) -> str | None:
    """Return the host of an origin; None when it is not a valid origin."""
    try:
        return _host_of(urlsplit(value).netloc)
    except ValueError:
        return None


class Gate:
    """Wraps the application. `tokens` None: no token is needed; `hosts` None: any Host is accepted; `forwarding` None:
    this server is alone; `others` None: it is one process; `tracing` None: no request is traced.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        tokens: Tokens | None,
        requests: OpenRequests,
        redact: Redact,
        max_body: int,
        hosts: frozenset[str] | None,
        ports: Ports,
        visits: PortVisits,
        forwarding: Forwarding | None,
        tracing: Tracing | None,
        others: OtherWorkers | None,
    ):
        self._app = app
        self._tokens = tokens
        self._requests = requests
        self._redact = redact
        self._max_body = max_body
        self._hosts = hosts
        self._ports = ports
        self._visits = visits
        self._forwarding = forwarding
        self._tracing = tracing
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        started = refused = False
        opened: OpenRequest | None = None
        caller: Caller | None = None
        traced: Span | None = None
        task = asyncio.current_task()
        assert task is not None

        async def watched(message: Message) -> None:
            nonlocal started, refused
            if opened is not None:
                if _stays_open(message):
                    opened.stays_open(task.cancel)
                if not started and scope.get("method") != "DELETE" and opened.token_ended:
                    # A caller that revoked its own token gets the answer; nobody else gets anything more with it.
                    started = refused = True
                    await _refuse(scope, send, opened.refusal())
            started = True
            if refused:
                return
            if message["type"] == "http.response.start":
                if traced is not None:
                    _answered(traced, scope, message["status"])
                name = "" if caller is None else caller.request_id or ""
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name.encode())]
            await send(message)

        try:
            is_forwarded = any(name == HEADER for name, _ in scope["headers"])
            visit = self._visits.recognize(scope, forwarded=is_forwarded)
            headers = {name: value for name, value in scope["headers"] if name in _WANTED}
            if visit is None or not (visit.by_host or is_forwarded):  # a port has a host of its own
                self._admit(scope, headers)
            if self._others is not None and self._others.changed:
                await self._others.follow()
            identity = await self._identify(scope, headers)
            opened = self._requests.open(identity)
            caller = scope[CALLER] = _caller(identity, headers)
            if self._tracing is not None and scope["path"] not in UNTRACED:
                facts = {"method": scope.get("method"), "actor": identity.subject, "request": caller.request_id}
                traced = self._tracing.request(scope.get("method") or scope["type"], caller.trace, facts)
                current.set(traced)
            if opened is not None and self._streams(scope):
                opened.stays_open(task.cancel)
            forwarding = self._forwarding
            if forwarding is None or (subject := forwarding.elsewhere(scope)) is None:
                await self._answer(caller, scope, headers, receive, watched, opened)
            else:
                known = caller

                async def here(again: Receive, held: Send) -> None:
                    await self._answer(known, scope, headers, again, held, opened)

                async def body(whole: Receive) -> bytes | None:
                    return await self._body(headers, whole)

                streams = self._streams(scope)
                await forwarding.serve(subject, scope, receive, watched, caller, here, body, streams=streams)
        except CarrelError as error:
            if started:  # the status is already sent: only a broken body can show the failure
                log.warning("%s broke off: %s", scope["path"], error)
            else:
                if isinstance(error, TooLarge) and scope["type"] == "http":
                    await _discard(receive)
                await _refuse(scope, send, error)
        except asyncio.CancelledError:
            if opened is None or not opened.cancelled:
                raise
            task.uncancel()
            log.info("%s was cancelled: its token is no longer valid", scope["path"])
            if not refused:
                await _end(scope, send, opened.refusal(), started=started)
        except Exception as error:
            if started and isinstance(error.__cause__, CarrelError):  # the framework wraps the error of a stream
                log.warning("%s broke off: %s", scope["path"], error.__cause__)
                return
            said = await self._told(scope, error)
            log.error("%s failed\n%s", scope["path"], said)  # noqa: TRY400 - the traceback may quote a secret
            if not started:
                await _refuse(scope, send, UNEXPECTED)
        finally:
            if opened is not None:
                opened.close()
            if traced is not None:
                current.set(None)
                traced.end()

    async def _answer(
        self,
        caller: Caller,
        scope: Scope,
        headers: dict[bytes, bytes],
        receive: Receive,
        send: Send,
        opened: OpenRequest | None,
    ) -> None:
        """Answer a request on this server."""
        if scope["type"] == "http" and scope["method"] in _BODY_METHODS and not self._streams(scope):
            body = await self._body(headers, receive)
            if body is None:
                return
            if (passed := scope.get(PASS)) is not None:
                require_body(passed, body)
            if caller.wait_s:
                await self._attended(caller, scope, body, receive, send, opened)
                return
            receive = replay(body, receive)
        await self._app(scope, receive, send)

    async def _told(self, scope: Scope, error: Exception) -> str:
        """Return the traceback without secrets, for the log."""
        named = scope.get("path_params") or {}
        try:
            return await self._redact(named.get("id") or named.get("context_id"), traceback.format_exc())
        except CarrelError:
            return type(error).__name__

    def _admit(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        connection = of_scope(scope)
        if self._hosts is not None and (connection is None or connection.node is None):
            # DNS rebinding: a page of another site still sends the name of that site.
            if _host_of(headers.get(b"host", b"")) not in self._hosts:
                raise InvalidRequest(
                    "the Host header names another host", field="Host", hint="use the address the server printed"
                )
            origin = headers.get(b"origin")
            if origin is not None and _origin_host(origin) not in self._hosts:
                raise InvalidRequest(
                    "requests from other sites are refused", field="Origin", hint="use the API directly"
                )

    async def _identify(self, scope: Scope, headers: dict[bytes, bytes]) -> Identity:
        if (known := scope.get(IDENTIFIED)) is not None:  # only code of this process can set it
            mark_authenticated(scope)
            return cast(Identity, known)
        if HEADER in headers:
            return await self._forwarded(scope, headers)
        connection = of_scope(scope)
        if connection is not None and connection.node is not None:
            raise Unauthorized(
                "this port takes requests that other servers forward, and no others",
                field="Carrel-Forwarded",
                hint="ask the server at its address for clients",
            )
        if (visit := scope.get(VISIT)) is not None:
            identity = await self._visitor(visit)
            mark_authenticated(scope)
            return identity
        if self._tokens is None:
            mark_authenticated(scope)
            return ROOT
        if scope["type"] == "http" and scope["path"] in OPEN_PATHS:
            return ROOT
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            given = b""
            if scope["type"] == "websocket":
                for offer in headers.get(b"sec-websocket-protocol", b"").split(b","):
                    if offer.strip().startswith(TOKEN_SUBPROTOCOL):
                        given = offer.strip()[len(TOKEN_SUBPROTOCOL) :]
        identity = await self._tokens.identify(given.strip())
        mark_authenticated(scope)
        return identity

    async def _visitor(self, visit: PortVisit) -> Identity:
        """Return the identity that a visitor of a port acts for."""
        sandbox, port, shown = visit.sandbox, visit.port, visit.shown
        if shown is not None and looks_like_one(shown):
            visitor = await self._ports.admits(sandbox, port, shown)
        elif self._tokens is None:
            visitor = Visitor(ROOT, "token")
        elif shown is not None:
            if visit.in_query:  # it would be in histories and logs
                raise Unauthorized(
                    "this is no access to a port", field="carrel-access", hint="ask for a URL of the port"
                )
            visitor = Visitor(await self._tokens.identify(shown), "token")
        else:
            visitor = await self._ports.admits_anyone(sandbox, port)
        visit.by, visit.expires_at, visit.wake = visitor.by, visitor.expires_at, visitor.wake
        return visitor.identity

    async def _forwarded(self, scope: Scope, headers: dict[bytes, bytes]) -> Identity:
        """Return the caller of a request that another server forwards."""
        if self._forwarding is None:
            raise Unauthorized(
                "this server is alone on its database, so nobody forwards requests to it",
                field="Carrel-Forwarded",
                hint="leave the header out",
            )
        identity, passed = await self._forwarding.identify(scope, headers[HEADER])
        if scope["type"] != "http" or scope["method"] not in _BODY_METHODS or self._streams(scope):
            require_length(passed, headers.get(b"content-length"))
        scope[PASS] = passed
        mark_authenticated(scope)
        return identity

    async def _attended(
        self, caller: Caller, scope: Scope, body: bytes, receive: Receive, send: Send, opened: OpenRequest | None
    ) -> None:
        """Serve a request that may wait for a person: if its caller disconnects meanwhile, or its token ends, it does
        not run.
        """
        gone = asyncio.Event()

        def away() -> bool:
            return gone.is_set() or (opened is not None and opened.token_ended)

        async def listen() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()

        scope[CALLER] = replace(caller, gone=away)
        listening = asyncio.ensure_future(listen())
        try:
            await self._app(scope, replay(body, receive), send)
        finally:
            await tasks.cancel([listening])

    @staticmethod
    def _streams(scope: Scope) -> bool:
        if VISIT in scope:
            return bool(scope["type"] == "http")
        known = STREAMED.get(scope["method"]) if scope["type"] == "http" else None
        return known is not None and known.fullmatch(scope["path"]) is not None

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length[:20]) > self._max_body:
            raise self._too_large()
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body: bytes = message.get("body", b"")
        if not message.get("more_body", False):
            if len(body) > self._max_body:
                raise self._too_large()
            return body
        parts, size = [body], len(body)
        while message.get("more_body", False):
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_body:
                raise self._too_large()
        return b"".join(parts)

    def _too_large(self) -> TooLarge:
        return TooLarge(
            f"the body is larger than {self._max_body} bytes",
            field="body",
            hint="send files with PUT …/files/content, or raise CARREL_MAX_BODY_MB",
        )


def _caller(identity: Identity, headers: dict[bytes, bytes]) -> Caller:
    """Return the caller of a request, from its token and headers."""
    named = headers.get(b"x-request-id", b"")
    request_id = named.decode() if _REQUEST_ID.fullmatch(named) else secrets.token_hex(8)
    approval = headers.get(b"carrel-approval")
    if approval is not None and not _APPROVAL.fullmatch(approval):
        raise InvalidRequest(
            "this is not the id of an approval", field="Carrel-Approval", hint="send the id that the refusal named"
        )
    wait = headers.get(b"carrel-wait")
    return Caller(
        identity,
        None if approval is None else approval.decode(),
        0.0 if wait is None else _seconds(wait),
        request_id,
        trace_of(headers.get(b"traceparent"), headers.get(b"tracestate")),
    )


def _answered(traced: Span, scope: Scope, status: int) -> None:
    """Tell a span what was asked for, and how it was answered."""
    route = getattr(scope.get("route"), "path", None)
    if isinstance(route, str):
        traced.rename(f"{scope['method']} {route}")
    traced.set(status=status, route=route)


def _seconds(given: bytes) -> float:
    try:
        seconds = float(given)
        if 0.0 <= seconds <= MAX_WAIT_S:
            return seconds
    except ValueError:
        pass
    raise InvalidRequest(
        f"how long to wait is 0 to {MAX_WAIT_S:.0f} seconds",
        field="Carrel-Wait",
        hint="ask again with the approval's id when it takes longer",
    )


def _stays_open(message: Message) -> bool:
    """Whether an answer is a stream or a terminal."""
    kind = message["type"]
    return kind == "websocket.accept" or (kind == "http.response.body" and bool(message.get("more_body", False)))


async def _discard(receive: Receive) -> None:
    """Read some more of a body that is too large: a caller that is cut off while sending would not see the answer."""
    left = _MAX_DISCARD
    try:
        async with asyncio.timeout(_MAX_DISCARD_S):
            while left > 0:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
                left -= len(message.get("body", b""))
    except TimeoutError:
        return


async def _end(scope: Scope, send: Send, error: CarrelError, *, started: bool) -> None:
    """Send the reason why a request ends early, if that is still possible; a started HTTP answer just ends."""
    if not started:
        await _refuse(scope, send, error)
    elif scope["type"] == "websocket":
        await send({"type": "websocket.send", "text": encode({"error": error.problem()}).decode()})
        await send({"type": "websocket.close", "code": 1008, "reason": error.code})


async def _refuse(scope: Scope, send: Send, error: CarrelError) -> None:
    if VISIT in scope and wants_page(scope):
        await send_page(error, send)
        return
    body = encode(error.problem())
    headers = [(b"content-type", MEDIA_TYPE.encode()), (b"content-length", b"%d" % len(body))]
    headers += [(name.encode(), value.encode()) for name, value in headers_of(error).items()]
    if error.status == 401 and VISIT not in scope:  # a browser would ask for a password
        headers.append((b"www-authenticate", b"Bearer"))
    if error.status == 413:
        headers.append((b"connection", b"close"))
    prefix = "http"
    if scope["type"] == "websocket":
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": 1008, "reason": error.code})
            return
        prefix = "websocket.http"
    await send({"type": f"{prefix}.response.start", "status": error.status, "headers": headers})
    await send({"type": f"{prefix}.response.body", "body": body})
