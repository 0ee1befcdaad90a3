from __future__ import annotations

from typing import Any

import httpx
import pytest
from starlette.routing import WebSocketRoute
from tests.support.governed import Known
from tests.support.refusals import Contract, refused

from carrel.api import app as application
from carrel.api.guard import OperationRoute
from carrel.api.ports import PortRoute
from carrel.client import AsyncSandbox
from carrel.client._async.connection import AsyncConnection
from carrel.client.locate import Address
from carrel.errors import Denied
from carrel.identity import LISTED, scope_of
from carrel.models import SandboxInfo
from carrel.models.operations import OPERATIONS, TABLE
from carrel.server import RunningServer

ADMINISTER = {
    "create_token", "get_token", "list_tokens", "revoke_token", "put_policy", "delete_policy",
    "list_secrets", "put_secret", "delete_secret",
    "put_template_secret", "list_template_secrets", "delete_template_secret", "prune_audit", "forget_context",
    "import_image", "build_image", "delete_image", "push_image", "export_image", "resize_pool",
    "revoke_node", "readmit_node",
}  # fmt: skip
"""What is deliberately for administrators only."""
THEMSELVES = {row.id for row in TABLE if row.context_from == "handler"}
"""Routes whose functions check the context themselves."""


def test_every_operation_is_declared(contract: Contract) -> None:
    found = {operation["operationId"] for _, _, operation in contract.operations()}
    assert found <= set(OPERATIONS), "give it a row in carrel.models.operations"
    assert {name for name in found if scope_of(name) == "administer"} == ADMINISTER
    assert found >= THEMSELVES


def test_every_route_is_guarded() -> None:
    """A route that names a sandbox or a context is about that; any other is a list, asks itself, or is for all."""
    sockets = []
    for module in application.resources():
        for route in module.router.routes:
            if isinstance(route, WebSocketRoute):
                sockets.append(route.path)
                continue
            if isinstance(route, PortRoute):  # it asks for `permit` itself, as sockets do
                sockets.append(route.path)
                continue
            assert type(route) is OperationRoute, route
            if "{id}" in route.path or "{context_id}" in route.path:
                assert route.row.id not in THEMSELVES | LISTED
            elif "{template}" in route.path or "{pool}" in route.path or "{node}" in route.path:
                assert route.row.id in ADMINISTER - THEMSELVES, "of no context: only for who reaches all"
            elif "{env}" in route.path:  # shows what is within reach, or is for who reaches what belongs to no context
                assert (route.row.id in LISTED) == (route.methods == {"GET"})
                assert route.row.id not in THEMSELVES
            elif "{image:path}" in route.path:
                assert (route.row.id in LISTED) == (route.methods == {"GET"})
                assert route.row.id in LISTED | ADMINISTER
            elif "{" in route.path:
                assert route.row.id in THEMSELVES
    box = "/v1/sandboxes/{id}"
    own = {f"{box}/terminals", f"{box}/commands/attached", f"{box}/ports/{{port}}", f"{box}/ports/{{port}}/"}
    assert {*sockets} == own, "a socket asks for `permit` itself"


def test_routes_are_those_of_the_table() -> None:
    routes = [route for module in application.resources() for route in module.router.routes]
    served = {
        (route.row.id, *(route.methods or ()), route.path) for route in routes if isinstance(route, OperationRoute)
    }
    served |= {(route.row.id, route.row.method, route.path) for route in routes if isinstance(route, PortRoute)}
    served |= {(route.name, "WEBSOCKET", route.path) for route in routes if isinstance(route, WebSocketRoute)}
    assert served == {(row.id, row.method, row.path) for row in TABLE if row.http}
    assert len(OPERATIONS) == len([row for row in TABLE if row.scope is not None]), "an operation id is used twice"


def sent(method: str, path: str, operation: dict[str, Any], name: str) -> dict[str, Any]:
    for place in ("id", "context_id"):
        path = path.replace(f"{{{place}}}", name)
    for place in ("cid", "snapshot_id", "name"):
        path = path.replace(f"{{{place}}}", "x")
    needed = [each for each in operation.get("parameters", []) if each["in"] == "query" and each["required"]]
    return {"method": method, "url": path, "params": {each["name"]: "x" for each in needed}}


async def test_a_namespace_is_not_left(
    http: httpx.AsyncClient, known: Known, contract: Contract, governed: str
) -> None:
    identity = (await http.get(governed)).json()["id"]
    stranger = await known("other", "service", "administer", namespace="other")
    for method, path, operation in contract.operations():
        if "{id}" not in path and "{context_id}" not in path:
            continue
        told = []
        for name in ("team:a", "team:absent", *([identity] if "{id}" in path else [])):
            problem = refused(await stranger.request(**sent(method, path, operation, name)), 403, None)
            assert problem["code"] == "denied_by_policy" and problem["rule"] == "reach"
            assert "team:a'" not in problem["detail"] or name == "team:a"
            told.append(problem["detail"].replace(name, ""))
        assert len(set(told)) == 1, "what is there and what is not look the same"
    refused(await stranger.post("/v1/sandboxes", json={"context_id": "team:a"}), 403, None)
    refused(await stranger.post("/v1/sandboxes", json={}), 403, None)
    refused(await stranger.get("/metrics"), 403, None)
    for path in ("/v1/audit", "/v1/audit/export"):
        refused(await stranger.get(path), 403, None)
        refused(await stranger.get(path, params={"context_id": "team:a"}), 403, None)
        assert (await stranger.get(path, params={"context_id": "other:x"})).status_code == 200
    assert (await stranger.get("/v1/sandboxes")).json()["items"] == []
    assert (await stranger.get("/v1/host")).status_code == 200
    refused(await stranger.get("/v1/sandboxes/other:absent"), 404, "id")
    made = await stranger.post("/v1/sandboxes", json={"context_id": "other:x", "trust": "high"})
    assert made.status_code == 201
    refused(await stranger.post(f"/v1/sandboxes/{made.json()['id']}/fork", json={"context_id": "team:b"}), 403, None)
    assert [each["context_id"] for each in (await stranger.get("/v1/sandboxes")).json()["items"]] == ["other:x"]
    assert {each["context_id"] for each in (await http.get("/v1/sandboxes")).json()["items"]} == {"other:x", "team:a"}


async def test_scopes(http: httpx.AsyncClient, known: Known, contract: Contract, governed: str) -> None:
    clients = {
        "read": await known("r", "agent", "read"),
        "operate": await known("o", "agent", "operate"),
        "approve": await known("p", "person", "approve"),
        "log": await known("l", "service", "log"),
    }
    covers = {
        "read": {"read"},
        "operate": {"read", "operate", "log"},
        "approve": {"read", "approve"},
        "log": {"log"},
    }
    for scope, client in clients.items():
        for method, path, operation in contract.operations():
            name = operation["operationId"]
            if scope_of(name) not in covers[scope] and name not in {"healthz", "readyz"}:
                problem = refused(await client.request(**sent(method, path, operation, "team:a")), 403, None)
                assert problem["rule"] == f"scope({scope_of(name)})"
    assert (await clients["read"].get(governed)).status_code == 200
    assert (await clients["operate"].post(f"{governed}/commands", json={"command": "echo"})).status_code == 200


async def test_a_token_for_some_contexts(known: Known, governed: str) -> None:
    agent = await known("a", "agent", "operate", contexts=["team:a"])
    assert (await agent.post(f"{governed}/commands", json={"command": "echo hi"})).json()["stdout"] == "hi\n"
    refused(await agent.post("/v1/sandboxes", json={"context_id": "team:b"}), 403, None)
    assert (await agent.get("/v1/audit", params={"context_id": "team:a"})).status_code == 200


async def test_terminals_are_guarded(
    server: RunningServer, http: httpx.AsyncClient, known: Known, governed: str
) -> None:
    info = SandboxInfo.model_validate((await http.get(governed)).json())
    for client in (await known("r", "agent", "read"), await known("o", "agent", "operate", namespace="other")):
        token = client.headers["authorization"].removeprefix("Bearer ")
        connection = AsyncConnection(Address(server.url, token), 30)
        with pytest.raises(Denied):
            await AsyncSandbox(connection, info).terminal()
        await connection.close()
