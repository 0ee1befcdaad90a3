"""Tells requests of E2B's SDKs from others, finds their caller, and answers them in E2B's forms.

Stands before the gate: every request that it makes passes there. The handlers are imported by the first request of an
E2B SDK.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Protocol, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from carrel.api.e2b.access import SandboxAccess
from carrel.api.e2b.inner import Inner, Watchers
from carrel.primitives.cache import Cache

log = logging.getLogger("carrel.api")

ENVD, CODE = 49983, 49999
_CONTROL = re.compile(r"/(?:v[23]/)?(?:sandboxes|snapshots|templates|secrets|volumes|volumecontent|teams)(?:/|$)")
_LABEL = re.compile(r"(\d{1,5})-(.+)")


@dataclass(frozen=True, slots=True)
class E2bTarget:
    """A port of a sandbox, or the control API if there is none."""

    port: int = 0
    sandbox: str = ""


class PortDomain(Protocol):
    """The domain below which ports of sandboxes have hosts: E2B's ports are two of them."""

    @property
    def domain(self) -> str | None: ...

    @property
    def authority(self) -> str: ...

    @property
    def domain_name(self) -> str | None: ...


class E2bFront:
    """Wraps the gate. Without a domain of ports, sandboxes have no hosts of their own. `running` returns the context
    and the labels of each sandbox that runs here, for signed URLs that name no sandbox.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: SandboxAccess,
        ports: PortDomain,
        hosts: frozenset[str] | None,
        running: Callable[[], list[tuple[str, dict[str, str]]]],
    ):
        self._app = app
        self._access = access
        self._domain = None if ports.domain is None else ports.authority
        self._name = ports.domain_name
        self._hosts = hosts
        self._running = running
        self._watchers: Watchers = Cache(4096)
        self._routes: ModuleType | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        target = self._target(scope) if scope["type"] == "http" else None
        if target is None:
            await self._app(scope, receive, send)
            return
        response = await self._answer(target, scope, receive)
        await response(scope, receive, send)

    def _target(self, scope: Scope) -> E2bTarget | None:
        """Return what a request is for; None if it is none of E2B's."""
        path: str = scope["path"]
        headers = {name: value for name, value in scope["headers"] if name in _READ}
        host = headers.get(b"host", b"").decode("latin-1").strip().lower().rsplit(":", 1)[0]
        if self._name is not None and host.endswith("." + self._name):
            label = host[: -len(self._name) - 1]
            if label == "api":
                return E2bTarget() if _CONTROL.match(path) else None
            found = _LABEL.fullmatch(label)
            if found is not None:
                port = int(found[1])
                return E2bTarget(port, found[2]) if port in {ENVD, CODE} else None
            if label != "sandbox":
                return None
        elif not self._known(host):
            return None  # the gate says why
        sandbox = headers.get(b"e2b-sandbox-id")
        if sandbox is not None:
            port = headers.get(b"e2b-sandbox-port", b"%d" % ENVD)
            return E2bTarget(int(port[:5]) if port.isdigit() else 0, sandbox.decode("latin-1"))
        if path == "/files" and b"signature=" in scope["query_string"]:
            return E2bTarget(ENVD)
        if _CONTROL.match(path) and (b"x-api-key" in headers or b"authorization" not in headers):
            return E2bTarget()
        return None

    def _known(self, host: str) -> bool:
        if self._hosts is None:
            return True
        try:
            return host in self._hosts or ipaddress.ip_address(host.strip("[]")).is_loopback
        except ValueError:
            return False

    async def _answer(self, target: E2bTarget, scope: Scope, receive: Receive) -> Response:
        if self._routes is None:
            self._routes = await asyncio.to_thread(import_module, "carrel.api.e2b.routes")
        routes, request = self._routes, Request(scope, receive)
        try:
            if target == E2bTarget():
                identity = await self._access.caller(request.headers.get("x-api-key"))
                inner = Inner(self._app, scope, receive, identity, self._watchers)
                return cast(Response, await routes.control(inner, self._access, self._domain, request))
            return await self._inside(routes, target, request, scope, receive)
        except Exception as error:
            try:
                return cast(Response, routes.refusal(target.port, request, error))
            except Exception:
                log.exception("a request of an E2B SDK failed")
                return cast(Response, routes.unexpected())

    async def _inside(
        self, routes: ModuleType, target: E2bTarget, request: Request, scope: Scope, receive: Receive
    ) -> Response:
        """Answer a request for a sandbox."""
        query, headers = request.query_params, request.headers
        sandbox = target.sandbox
        if target.port == ENVD and request.url.path == "/files" and "signature" in query:
            signed = routes.signature_of(request)
            sandbox, identity = await routes.signer(self._access, signed, sandbox, self._running())
        else:
            token = headers.get("x-access-token") or headers.get("e2b-traffic-access-token")
            identity = await self._access.holder(token, sandbox)
        inner = Inner(self._app, scope, receive, identity, self._watchers)
        return cast(Response, await routes.inside(target.port, inner, sandbox, request))


_READ = frozenset({b"host", b"x-api-key", b"authorization", b"e2b-sandbox-id", b"e2b-sandbox-port"})
