"""Builds the application: routes, problem answers, the gate before them, and a complete OpenAPI document.

The routes that a new sandbox and its first program need are imported at once. The first request for any other route
imports the rest: a server that runs one program must start quickly.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode
from starlette.applications import Starlette
from starlette.responses import HTMLResponse, JSONResponse
from starlette.routing import BaseRoute, Match, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from carrel.api import approvals, attached, commands, host, policies, problems, sandboxes, secrets
from carrel.api.e2b.access import SandboxAccess
from carrel.api.e2b.front import E2bFront
from carrel.api.forwarding import Forwarding
from carrel.api.gate import Gate
from carrel.api.guard import OperationRoute, import_framework
from carrel.api.page import page
from carrel.api.port_visits import PortVisits
from carrel.api.worker_metrics import WorkerMetrics
from carrel.control.plane import ControlPlane

DESCRIPTION = """A private, durable, governed workspace for every AI agent.

Every failure is a problem object (RFC 9457) with a stable `code`, the offending `field` and a `hint`.

An operation that needs a person is refused with 403, the code `approval_needed` and the id of an `approval` that waits.
Send the same request again with the header `Carrel-Approval: ID` once it is approved: it then runs once. Or send
`Carrel-Wait: SECONDS` (at most 600) at first, and the answer waits for the decision. `X-Request-Id` names a request in
the audit log.

Terminals are WebSockets at `/v1/sandboxes/{id}/terminals?rows=&cols=&command=` (or `&word=…&word=…`, which needs no
shell): binary frames are bytes both ways, a text frame `{"resize": {"rows": 24, "cols": 80}}` resizes, and at the end
comes a text frame `{"exit": CommandInfo}`. The token goes into the `Authorization` header or into a subprotocol
`carrel.token.TOKEN` offered beside `carrel`."""


def create_app(
    plane: ControlPlane, *, authenticated: bool, hosts: frozenset[str] | None = None, version: str = "0.1.0"
) -> ASGIApp:
    """Build the ASGI application for a control plane. Without `authenticated` it needs no token; `hosts` None accepts
    any Host header.
    """
    forwarding = None
    if plane.nodes.shared:
        forwarding = Forwarding(
            plane.routing,
            plane.passes,
            plane.live,
            plane.tokens,
            plane.metrics,
            authenticated=authenticated,
            verified=plane.identities is not None,
        )
    app = routes(plane, version)
    app.state.worker_metrics = None
    if plane.worker.count > 1:
        app.state.worker_metrics = WorkerMetrics(plane.routing, plane.passes, plane.worker, authenticated=authenticated)
    gate = Gate(
        app,
        tokens=plane.tokens if authenticated else None,
        requests=plane.requests,
        redact=plane.secret_values.clean_text,
        max_body=plane.settings.max_body,
        hosts=hosts,
        ports=plane.ports,
        visits=_visits(plane),
        forwarding=forwarding,
        tracing=plane.tracing,
        others=plane.others,
    )

    def running() -> list[tuple[str, dict[str, str]]]:
        records = (box.record for box in plane.sessions.live())
        return [(record.context_id, dict(record.labels)) for record in records if record.context_id is not None]

    access = SandboxAccess(plane.e2b_key, plane.tokens if authenticated else None)
    return E2bFront(gate, access, plane.settings.ports, hosts, running)


def _visits(plane: ControlPlane) -> PortVisits:
    """Return what recognizes requests to ports. Two names below their domain are for E2B's clients."""
    ports = plane.settings.ports
    return PortVisits(
        {} if ports.domain_name is None else {ports.domain_name: ports.scheme}, frozenset({"api", "sandbox"})
    )


_FIRST = (commands, sandboxes, attached, approvals, policies, secrets, host)
_ALL = (
    "commands", "ports", "jobs", "python", "sandboxes", "files", "stateless", "code_contexts", "mcp_servers",
    "terminals", "attached", "approvals", "audit", "checkpoints", "contexts", "envs", "events", "filespaces", "host",
    "images", "metrics", "policies", "pools", "secrets", "snapshots", "templates", "tokens", "tools",
)  # fmt: skip
"""The most frequent first: the framework tries the routes one after the other."""
_importing = threading.Lock()


def resources() -> list[ModuleType]:
    """Import the modules of all resources. It takes a while: call it in a thread."""
    with _importing:
        return [import_module(f"carrel.api.{name}") for name in _ALL]


class _OtherRoutes(BaseRoute):
    """Takes every request that no other route takes: it adds the routes that are not imported yet, and tries again."""

    def __init__(self, router: Router, version: str):
        self._router = router
        self._version = version

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return Match.FULL, {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        modules = await asyncio.to_thread(resources)
        if self in self._router.routes:
            self._router.routes[:] = [*_routes_of(modules), *self._documents()]
        await self._router.app(scope, receive, send)

    def _documents(self) -> list[BaseRoute]:
        @cache
        def openapi() -> dict[str, Any]:
            return describe(self._version)

        return [
            Route("/openapi.json", lambda _request: JSONResponse(openapi())),
            Route("/docs", lambda _request: HTMLResponse(page(openapi()))),
        ]


def _routes_of(modules: Iterable[ModuleType]) -> list[BaseRoute]:
    return [route for module in modules for route in module.router.routes]


def routes(plane: ControlPlane, version: str) -> Starlette:
    """Build the application behind the gate."""
    router = Router(_routes_of(_FIRST), redirect_slashes=False)
    router.routes.append(_OtherRoutes(router, version))
    app = Starlette(exception_handlers=problems.handlers(router.routes))
    app.router = router
    app.state.plane = plane
    return app


def describe(version: str) -> dict[str, Any]:
    """Return the OpenAPI document. Run it in a thread: it imports FastAPI and builds every route."""
    import_framework()
    from fastapi.openapi.utils import get_openapi

    from carrel.api import mcp_servers, stateless
    from carrel.models.events import EventInfo
    from carrel.models.images import ImageEvent

    declared = [route for route in _routes_of(resources()) if isinstance(route, OperationRoute)]
    document = get_openapi(
        title="carrel", version=version, description=DESCRIPTION, routes=[route.built for route in declared]
    )
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})

    def add(model: type[BaseModel], mode: JsonSchemaMode) -> None:
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}", mode=mode)
        for name, part in {**schema.pop("$defs", {}), model.__name__: schema}.items():
            schemas.setdefault(name, part)

    for route in declared:
        if route.parses is not None:
            add(route.parses, "validation")
    for model in (
        problems.Problem,
        commands.EVENT_MODEL,
        mcp_servers.CALL_MODEL,
        stateless.CALL_MODEL,
        ImageEvent,
        EventInfo,
    ):
        add(model, "serialization")
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    components["securitySchemes"] = {
        "token": {
            "type": "http",
            "scheme": "bearer",
            "description": "the token the server printed, or one made with it",
        }
    }
    document["security"] = [{"token": []}]
    return document
