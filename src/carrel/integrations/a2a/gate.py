"""Checks the token and the size of every request before the SDK sees it. The card and the health check are public."""

from __future__ import annotations

import logging

from a2a.extensions.common import HTTP_EXTENSION_HEADER, get_requested_extensions
from a2a.server.context import ServerCallContext
from a2a.server.routes import ServerCallContextBuilder
from a2a.utils.constants import VERSION_HEADER
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from carrel.connections import mark_authenticated
from carrel.errors import CarrelError, PlatformError, TooLarge, Unauthorized
from carrel.integrations.a2a.callers import A2aCaller, Callers
from carrel.integrations.http import TOKEN_HINT, bearer_token, problem_response

log = logging.getLogger("carrel.a2a")

MAX_BODY = 4 * 1024 * 1024
CALLER = "carrel.caller"


class TokenGate:
    """ASGI middleware that admits callers."""

    def __init__(self, app: ASGIApp, callers: Callers, open_paths: frozenset[str], *, max_body: int = MAX_BODY):
        self._app = app
        self._callers = callers
        self._open = open_paths
        self._max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
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
                scope[CALLER] = await self._callers.admit(bearer_token(Headers(scope=scope)))
                mark_authenticated(scope)
            body = await self._body(scope, receive)
            if body is not None:
                await self._app(scope, _replay(body, receive), watched)
        except CarrelError as error:
            if started:
                raise
            await problem_response(error)(scope, receive, send)
        except Exception:
            log.exception("a request failed")
            if started:
                raise
            failure = PlatformError("the agent failed", hint="its log says more")
            await problem_response(failure)(scope, receive, send)

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """Read the whole body; None when the caller disconnected."""
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
        raise TooLarge(f"the body of a request is limited to {self._max_body} bytes", field="body")


class CallContexts(ServerCallContextBuilder):
    """Builds the SDK's context of a call: the caller, and only the headers that the protocol uses."""

    def build(self, request: Request) -> ServerCallContext:
        """Build the context of one request."""
        version = request.headers.get(VERSION_HEADER) or request.query_params.get(VERSION_HEADER, "")
        extensions = get_requested_extensions(request.headers.getlist(HTTP_EXTENSION_HEADER))
        caller = request.scope.get(CALLER)
        if not isinstance(caller, A2aCaller):
            raise Unauthorized("the request has no caller", hint=TOKEN_HINT)
        return ServerCallContext(
            user=caller, state={"headers": {VERSION_HEADER: version}}, requested_extensions=extensions
        )


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body once, then passes on that the caller disconnects."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
