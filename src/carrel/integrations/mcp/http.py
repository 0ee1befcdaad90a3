"""The MCP server over streamable HTTP: checks host, token and context of a request before MCP handles it.

The token is only passed on: carrel decides what it may do.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser, AuthorizationContext
from mcp.server.auth.provider import AccessToken
from mcp.server.streamable_http import StreamableHTTPServerTransport
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecurityMiddleware, TransportSecuritySettings
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from carrel.connections import mark_authenticated
from carrel.errors import CarrelError, InvalidRequest, NotFound
from carrel.integrations.http import bearer_token, is_wildcard, problem_response
from carrel.integrations.mcp.server import CALLER, McpCaller, WorkspaceServer
from carrel.primitives.cache import Cache

CONTEXT_HEADER = "carrel-context"
KNOWN_S = 60.0
MOST_KNOWN = 4096
_CONTEXT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def application(
    workspaces: WorkspaceServer, *, hosts: Collection[str] = (), context_id: str | None = None, host: str = "127.0.0.1"
) -> Starlette:
    """Make the ASGI application. `hosts` are more host names to allow; `context_id` is for requests that name none."""
    manager = FairManager(workspaces.server)
    front = HttpFront(workspaces, manager, allowed(hosts, host), context_id)
    routes = [Route("/mcp", endpoint=front), Route("/{context}/mcp", endpoint=front)]
    return Starlette(routes=routes, lifespan=lambda _app: manager.run())


def allowed(hosts: Collection[str], host: str) -> TransportSecuritySettings:
    """Return the allowed Host and Origin headers. They stop DNS rebinding: a web page whose host name resolves to
    this server sends that name.
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


class FairManager(StreamableHTTPSessionManager):
    """Limits MCP sessions fairly: one identity may have at most as many as are still free, so one alone gets half."""

    def _admit_session(self, requestor: AuthorizationContext | None) -> StreamableHTTPServerTransport | None:
        subject = None if requestor is None else requestor["subject"]
        own = sum(owner["subject"] == subject for owner in self._session_owners.values())
        if self.max_sessions is not None and own >= self.max_sessions - len(self._server_instances):
            return None
        return super()._admit_session(requestor)


class HttpFront:
    """Checks the caller and the context before the body of a request is read."""

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
        self._subjects: Cache[str, str] = Cache(MOST_KNOWN, KNOWN_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        request = Request(scope)
        refusal: Response | None = await self._security.validate_request(request)
        if refusal is None:
            try:
                caller = McpCaller(bearer_token(request.headers), self._context(request))
                subject = await self._check(caller)
                mark_authenticated(scope)
            except CarrelError as error:
                refusal = problem_response(error)
            else:
                # An MCP session belongs to the token and the context that opened it.
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
                "this is not a valid context id",
                field="Carrel-Context",
                hint="1 to 128 letters, digits, `.`, `_`, `:`, `-`, a letter or digit first",
            )
        return str(context_id)

    async def _check(self, caller: McpCaller) -> str:
        """Return the identity of a token. An unknown token, or one for other contexts, is refused here and not first
        by a tool. What the token may do is decided at each call.
        """
        subject = self._subjects.get(caller.digest)
        if subject is not None:
            return subject
        async with self._workspaces.clients.access(caller.token, caller.context_id) as access:
            try:
                await access.client.find(caller.context_id)
            except NotFound:
                pass  # the first call creates the context
            subject = (await access.client.tokens.mine()).subject
        self._subjects.put(caller.digest, subject)
        return subject
