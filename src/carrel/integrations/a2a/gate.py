"""What every request passes first: the token and the size of the body. The card and the health answer are public.

Plain ASGI. Knows the open paths and no other route.
"""

from __future__ import annotations

import json
import logging

from a2a.extensions.common import HTTP_EXTENSION_HEADER, get_requested_extensions
from a2a.server.context import ServerCallContext
from a2a.server.routes import ServerCallContextBuilder
from a2a.utils.constants import VERSION_HEADER
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from carrel.connections import mark_authenticated
from carrel.errors import CarrelError, PlatformError, TooLarge, Unauthorized
from carrel.integrations.a2a.callers import A2aCaller, Callers

log = logging.getLogger("carrel.a2a")

MAX_BODY = 4 * 1024 * 1024
CALLER = "carrel.caller"
_CHALLENGE = (b"www-authenticate", b'Bearer realm="carrel"')


class TokenGate:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, callers: Callers, open_paths: frozenset[str], *, max_body: int = MAX_BODY):
        self._app = app
        self._callers = callers
        self._open = open_paths
        self._max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            if scope["path"] not in self._open:
                scope[CALLER] = await self._callers.admit(_token(scope))
                mark_authenticated(scope)
            body = await self._body(scope, receive)
            if body is not None:
                await self._app(scope, _replay(body, receive), watched)
        except CarrelError as error:
            if started:
                raise
            await _answer(send, error)
        except Exception:
            log.exception("a request failed")
            if started:
                raise
            await _answer(send, PlatformError("the agent failed", hint="its log says more"))

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; None when the caller went away."""
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        taken = bytearray()
        while declared.isdigit() and int(declared) <= self._max_body:
            message = await receive()
            if message["type"] != "http.request":
                return None
            taken += message.get("body", b"")
            if len(taken) > self._max_body:
                break
            if not message.get("more_body"):
                return bytes(taken)
        raise TooLarge(f"a request has at most {self._max_body} bytes", field="body")


class CallContexts(ServerCallContextBuilder):
    """Builds the context of a call: who calls, and of the headers only those that the protocol reads."""

    def build(self, request: Request) -> ServerCallContext:
        """The context of one request."""
        version = request.headers.get(VERSION_HEADER) or request.query_params.get(VERSION_HEADER, "")
        extensions = get_requested_extensions(request.headers.getlist(HTTP_EXTENSION_HEADER))
        caller = request.scope.get(CALLER)
        if not isinstance(caller, A2aCaller):
            raise Unauthorized("nobody is known to have sent this", hint="send `Authorization: Bearer TOKEN`")
        return ServerCallContext(
            user=caller, state={"headers": {VERSION_HEADER: version}}, requested_extensions=extensions
        )


def _replay(body: bytes, receive: Receive) -> Receive:
    """Gives the body once, then what else comes: that the caller goes away."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _token(scope: Scope) -> str:
    value: str = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
    scheme, _, token = value.partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthorized("a token of carrel is needed", hint="send `Authorization: Bearer TOKEN`")
    return token.strip()


async def _answer(send: Send, error: CarrelError) -> None:
    body = json.dumps(error.problem()).encode()
    headers = [(b"content-type", b"application/problem+json"), (b"content-length", str(len(body)).encode())]
    if error.status == Unauthorized.status:
        headers.append(_CHALLENGE)
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
