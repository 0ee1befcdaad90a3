"""Builds the application: routes, problem answers, the gate before them, and a complete OpenAPI document."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode
from starlette.applications import Starlette
from starlette.responses import HTMLResponse, JSONResponse
from starlette.routing import BaseRoute, Route, Router

from carrel.api import (
    approvals,
    attached,
    audit,
    checkpoints,
    code_contexts,
    commands,
    contexts,
    envs,
    files,
    filespaces,
    host,
    images,
    mcp_servers,
    metrics,
    policies,
    problems,
    python,
    sandboxes,
    secrets,
    snapshots,
    stateless,
    templates,
    terminals,
    tokens,
    tools,
)
from carrel.api.gate import Gate
from carrel.api.guard import OperationRoute, import_framework
from carrel.api.page import page
from carrel.control.plane import ControlPlane

DESCRIPTION = """A private, durable, governed workspace for every AI agent.

Every failure is a problem object (RFC 9457) with a stable `code`, the offending `field` and a `hint`.

An operation that needs a person is refused with 403, the code `approval_needed` and the id of an `approval` that waits.
Send the same request again with the header `Carrel-Approval: ID` once it is approved: it then runs once. Or send
`Carrel-Wait: SECONDS` (at most 600) at first, and the answer waits for the decision. `X-Request-Id` names a request in
the audit log.

Terminals are WebSockets at `/v1/sandboxes/{id}/terminals?rows=&cols=&command=`: binary frames are bytes both
ways, a text frame `{"resize": {"rows": 24, "cols": 80}}` resizes, and at the end comes a text frame `{"exit":
CommandInfo}`. The token goes
into the `Authorization` header or into a subprotocol `carrel.token.TOKEN` offered beside `carrel`."""


def create_app(
    plane: ControlPlane, *, authenticated: bool, hosts: frozenset[str] | None = None, version: str = "0.1.0"
) -> Gate:
    """Build the ASGI application for a control plane. Without `authenticated` it needs no token; `hosts` None accepts
    any Host header.
    """
    return Gate(
        routes(plane, version),
        tokens=plane.tokens if authenticated else None,
        requests=plane.requests,
        redact=plane.secret_values.clean_text,
        max_body=plane.settings.max_body,
        hosts=hosts,
    )


_RESOURCES = (
    commands, python, sandboxes, files, stateless, code_contexts, mcp_servers, terminals, attached,
    approvals, audit, checkpoints, contexts, envs, filespaces, host, images, metrics, policies, secrets, snapshots,
    templates, tokens, tools,
)  # fmt: skip
"""The most frequent first: the framework tries the routes one after the other."""


def routes(plane: ControlPlane, version: str) -> Starlette:
    """Build the application behind the gate."""
    served: list[BaseRoute] = [route for module in _RESOURCES for route in module.router.routes]

    @cache
    def openapi() -> dict[str, Any]:
        return describe(version)

    served.append(Route("/openapi.json", lambda _request: JSONResponse(openapi())))
    served.append(Route("/docs", lambda _request: HTMLResponse(page(openapi()))))
    app = Starlette(exception_handlers=problems.handlers(served))
    app.router = Router(served, redirect_slashes=False)
    app.state.plane = plane
    return app


def describe(version: str) -> dict[str, Any]:
    """Return the OpenAPI document. Run it in a thread: it imports FastAPI and builds every route."""
    import_framework()
    from fastapi.openapi.utils import get_openapi

    declared = [route for module in _RESOURCES for route in module.router.routes if isinstance(route, OperationRoute)]
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
    for model in (problems.Problem, commands.EVENT_MODEL, mcp_servers.CALL_MODEL, stateless.CALL_MODEL):
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
