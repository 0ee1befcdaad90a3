"""The MCP server over streamable HTTP: a front that knows the caller's token and context, and the addresses it may be
reached by.

The token is only passed on: carrel decides what it may do.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Collection
from ipaddress import ip_address

from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser, AuthorizationContext
from mcp.server.auth.provider import AccessToken
from mcp.server.streamable_http import StreamableHTTPServerTransport
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecurityMiddleware, TransportSecuritySettings
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from carrel.client.locate import sendable
from carrel.connections import mark_authenticated
from carrel.errors import CarrelError, InvalidRequest, NotFound, Unauthorized
from carrel.integrations.mcp.server import CALLER, McpCaller, WorkspaceServer

CONTEXT_HEADER = "carrel-context"
KNOWN_S = 60.0
MOST_KNOWN = 4096
_CONTEXT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def application(
    workspaces: WorkspaceServer, *, hosts: Collection[str] = (), context_id: str | None = None, host: str = "127.0.0.1"
) -> Starlette:
    """The ASGI application. `hosts` are more names it may be reached by; `context_id` is for those who name none."""
    manager = FairManager(workspaces.server)
    front = HttpFront(workspaces, manager, allowed(hosts, host), context_id)
    routes = [Route("/mcp", endpoint=front), Route("/{context}/mcp", endpoint=front)]
    return Starlette(routes=routes, lifespan=lambda _app: manager.run())


def allowed(hosts: Collection[str], host: str) -> TransportSecuritySettings:
    """The Host and Origin headers that are let in: a page of another site whose name was made to point here names that
    site.
    """
    names = [*_LOOPBACK, *hosts]
    if not is_wildcard(host):
        names.append(f"[{host}]" if ":" in host else host)
    return TransportSecuritySettings(
        allowed_hosts=[form for name in names for form in (name, f"{name}:*")],
        allowed_origins=[
            form for name in names for kind in ("http", "https") for form in (f"{kind}://{name}", f"{kind}://{name}:*")
        ],
    )


def is_wildcard(host: str) -> bool:
    """Whether an address to listen on means all of them."""
    try:
        return not host or ip_address(host).is_unspecified
    except ValueError:
        return False


def url_of(host: str, port: int) -> str:
    """The address a client on this machine may use."""
    name = "127.0.0.1" if is_wildcard(host) else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}"


class FairManager(StreamableHTTPSessionManager):
    """Keeps MCP sessions. Whom a token stands for may have as many as there is still room for: alone half of all, and
    whoever comes next always finds some.
    """

    def _admit_session(self, requestor: AuthorizationContext | None) -> StreamableHTTPServerTransport | None:
        subject = None if requestor is None else requestor["subject"]
        own = sum(owner["subject"] == subject for owner in self._session_owners.values())
        if self.max_sessions is not None and own >= self.max_sessions - len(self._server_instances):
            return None
        return super()._admit_session(requestor)


class HttpFront:
    """Finds out who calls and where, before anything of a request is read."""

    def __init__(
        self,
        workspaces: WorkspaceServer,
        manager: StreamableHTTPSessionManager,
        security: TransportSecuritySettings,
        context_id: str | None,
    ):
        self._workspaces = workspaces
        self._manager = manager
        self._security = TransportSecurityMiddleware(security)
        self._context_id = context_id
        self._known: OrderedDict[str, tuple[float, str]] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it."""
        request = Request(scope)
        refusal: Response | None = await self._security.validate_request(request)
        if refusal is None:
            try:
                caller = McpCaller(_token(request), self._context(request))
                subject = await self._check(caller)
                mark_authenticated(scope)
            except CarrelError as error:
                refusal = _problem(error)
            else:
                # An MCP session is for the token and the context that opened it, and for no other.
                access = AccessToken(token=caller.token or "", client_id=caller.digest, scopes=[], subject=subject)
                inner = {**scope, "user": AuthenticatedUser(access), CALLER: caller}
                await self._manager.asgi_app(inner, receive, send)
                return
        await refusal(scope, receive, send)

    def _context(self, request: Request) -> str:
        named = request.path_params.get("context")
        given = request.headers.get(CONTEXT_HEADER)
        if named is not None and given is not None and named != given:
            raise InvalidRequest(
                "the path and the header name different contexts", field="Carrel-Context", hint="name one of them"
            )
        context_id = named or given or self._context_id
        if context_id is None:
            raise InvalidRequest(
                "no context is named",
                field="Carrel-Context",
                hint="use the path /CONTEXT/mcp, or send the header Carrel-Context",
            )
        if _CONTEXT.fullmatch(context_id) is None:
            raise InvalidRequest(
                "this cannot be a context",
                field="Carrel-Context",
                hint="1 to 128 letters, digits, `.`, `_`, `:`, `-`, a letter or digit first",
            )
        return str(context_id)

    async def _check(self, caller: McpCaller) -> str:
        """Whom a token stands for. One that carrel does not know, or that does not reach the context, is refused: told
        at once, and not first by a tool. What it may do is decided anew at each call.
        """
        now = time.monotonic()
        checked, subject = self._known.get(caller.digest, (-KNOWN_S, ""))
        if checked > now - KNOWN_S:
            return subject
        async with self._workspaces.clients.place(caller.token, caller.context_id) as place:
            try:
                await place.client.find(caller.context_id)
            except NotFound:
                pass  # the context is made by the first call
            subject = (await place.client.tokens.mine()).subject
        self._known[caller.digest] = now, subject
        self._known.move_to_end(caller.digest)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        return subject


def _token(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not sendable(token):
        raise Unauthorized("a token is needed", hint="send the header Authorization: Bearer TOKEN")
    return token


def _problem(error: CarrelError) -> Response:
    headers = {"www-authenticate": "Bearer"} if error.status == 401 else None
    return JSONResponse(error.problem(), error.status, headers, media_type="application/problem+json")
