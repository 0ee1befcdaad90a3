"""Callers of the agent. Each sends a carrel token, which carrel checks, and with which their tasks call the API.

Tokens are held only in memory. Tasks belong to the identity of a token, so a new token of that identity finds them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from a2a.auth.user import User
from a2a.extensions.common import HTTP_EXTENSION_HEADER, get_requested_extensions
from a2a.server.context import ServerCallContext
from a2a.server.routes import ServerCallContextBuilder
from a2a.utils.constants import VERSION_HEADER
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from carrel.client import AsyncClient
from carrel.client.locate import sendable
from carrel.connections import mark_authenticated, replay
from carrel.errors import CarrelError, PlatformError, TooLarge, Unauthorized
from carrel.integrations.client_pool import ClientPool
from carrel.integrations.http import TOKEN_HINT, bearer_token, problem_response
from carrel.models import IdentityInfo
from carrel.primitives.cache import Cache

log = logging.getLogger("carrel.a2a")

MAX_BODY = 4 * 1024 * 1024
CALLER = "carrel.caller"
TRUSTED_S = 5.0
"""How long a token is accepted without asking carrel again; carrel checks each operation anyway."""
MAX_CLIENTS = 64
MAX_NAMES = 4096


class A2aCaller(User):
    """One caller. The token is left out of the printed form."""

    def __init__(self, token: str, name: str):
        self.token = token
        self.name = name

    def __repr__(self) -> str:
        return f"<A2aCaller {self.name[:8]}>"

    @property
    def is_authenticated(self) -> bool:
        """Always true: carrel has accepted the token."""
        return True

    @property
    def user_name(self) -> str:
        """The owner of the caller's tasks."""
        return self.name


def owner(identity: IdentityInfo) -> str:
    """Return the name that owns the tasks of an identity; it is the same for each of its tokens.

    It includes the namespace and contexts of the token. Otherwise someone who may make tokens for one namespace could
    choose a name whose tasks belong to another.
    """
    known = [identity.subject, identity.namespace, identity.contexts and sorted(identity.contexts)]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:40]


class Callers:
    """Checks the tokens of callers, and has a client for each of them."""

    def __init__(self, url: str, *, clock: Callable[[], float] = time.monotonic):
        self._clients = ClientPool(url, MAX_CLIENTS)
        self._names: Cache[str, str] = Cache(MAX_NAMES, TRUSTED_S, clock=clock)

    async def admit(self, token: str) -> A2aCaller:
        """Return the caller of a token. Raises `Unauthorized` when carrel does not accept the token."""
        if not sendable(token):
            raise Unauthorized("this is not a carrel token", hint=TOKEN_HINT)
        name = self._names.get(token)
        if name is None:
            async with self._clients.client(token) as client:
                name = owner(await client.tokens.mine())
            self._names.put(token, name)
        return A2aCaller(token, name)

    def client(self, caller: A2aCaller) -> AbstractAsyncContextManager[AsyncClient]:
        """Use a client with the caller's own token."""
        return self._clients.client(caller.token)

    async def close(self) -> None:
        """Close every client."""
        await self._clients.close()


def caller_of(context: ServerCallContext) -> A2aCaller:
    """Return the caller of a request."""
    if not isinstance(context.user, A2aCaller):
        raise Unauthorized("the request has no caller", hint=TOKEN_HINT)
    return context.user


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
                await self._app(scope, replay(body, receive), watched)
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
