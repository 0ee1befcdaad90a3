from __future__ import annotations

import json
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
from tests.support.refusals import Contract, refused

from carrel.models.bundles import END, MEDIA_TYPE, BundlePart
from carrel.policy.verdict import Verdict
from carrel.server import RunningServer

BODIES: dict[str, dict[str, Any]] = {
    "deploy_or_resume": {"context_id": "other"},
    "run_command": {"command": "true"},
    "start_command": {"command": "true"},
    "stream_command": {"command": "true"},
    "execute": {"code": "true"},
    "tool_request": {"tool_name": "create_file", "params": {"path": "x", "content": ""}},
    "edit_file": {"path": "x", "old": "a", "new": "b"},
    "move_file": {"source": "x", "destination": "y"},
    "make_directory": {"path": "x"},
    "restore": {"snapshot_id": "snap-x"},
    "execute_stateless": {"code": "1"},
    "read_files": {"paths": ["x"]},
    "run_python": {"code": "1"},
    "start_python": {"code": "1"},
    "stream_python": {"code": "1"},
    "run_cell": {"code": "1"},
    "stream_cell": {"code": "1"},
    "build_env": {"requirements": ["nail"]},
    "attach_env": {"requirements": ["nail"]},
    "fork": {"context_id": "forked"},
    "add_mcp_server": {"command": ["true"]},
    "mcp_request": {"tool": "x"},
    "decide_approval": {"approve": True},
    "decide_approvals": {"ids": ["apr-x"], "decision": {"approve": True}},
    "explain_policy": {"command": "true"},
    "resize_pool": {"size": 1},
    "share_port": {"port": 8000},
    "create_token": {"name": "ann", "kind": "person", "scopes": ["read"]},
}
"""A good body for each operation that cannot do without one."""
OPEN = {"healthz", "readyz"}


def request(method: str, path: str, operation: dict[str, Any], box: str = "absent") -> dict[str, Any]:
    """The arguments of a good request for an operation."""
    sent: dict[str, Any] = {
        "method": method,
        "url": path.replace("{id}", box).replace("{cid}", "c1").replace("{port}", "8000"),
    }
    for name in (
        "snapshot_id",
        "approval_id",
        "token_id",
        "context_id",
        "template",
        "env",
        "name",
        "cell",
        "server",
        "pool",
    ):
        sent["url"] = sent["url"].replace(f"{{{name}}}", "none-x")
    if operation["operationId"] in BODIES:
        sent["json"] = BODIES[operation["operationId"]]
    elif operation["operationId"] == "connect_mcp_server":  # its bodies are messages of another protocol
        sent["content"] = b""
    elif "requestBody" in operation and "application/json" in operation["requestBody"]["content"]:
        sent["json"] = {}
    elif "requestBody" in operation and MEDIA_TYPE in operation["requestBody"]["content"]:
        part = (
            BundlePart("request", 12) if operation["operationId"] == "execute_bundle" else BundlePart("file", 12, "x")
        )
        sent["content"] = part.head() + b'{"code":"1"}' + END
    needed = [each for each in operation.get("parameters", []) if each["in"] == "query" and each["required"]]
    if needed:
        sent["params"] = {each["name"]: "x" for each in needed}
    return sent


async def test_openapi_is_complete_and_true(contract: Contract) -> None:
    document, text = contract.document, json.dumps(contract.document)
    operations = {operation["operationId"]: operation for _, _, operation in contract.operations()}
    assert {"deploy_or_resume", "run_command", "tool_request", "terminate", "write_file", "send_input"} <= set(
        operations
    )
    assert len(operations) == len(contract.operations())
    assert "HTTPValidation" not in text
    for name, operation in operations.items():
        if name not in OPEN:
            problem = operation["responses"]["400"]["content"]["application/problem+json"]["schema"]
            assert problem == {"$ref": "#/components/schemas/Problem"}, name
            assert "401" in operation["responses"], name
        assert [status for status in operation["responses"] if status.startswith("2")], name
        if "requestBody" in operation and name != "write_file":
            assert "413" in operation["responses"], name
    run = operations["run_command"]
    assert run["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("CommandRequest")
    assert [each["name"] for each in run["parameters"]] == ["id"]
    for name in ("write_file", "send_input"):
        assert "application/octet-stream" in operations[name]["requestBody"]["content"]
    assert document["security"] == [{"token": []}] and operations["healthz"]["security"] == []
    for part in text.split('"$ref": "#/components/schemas/')[1:]:
        assert part.split('"')[0] in document["components"]["schemas"]
    assert {"200", "201", "409", "422", "429", "503"} <= set(operations["deploy_or_resume"]["responses"])
    assert "200" not in operations["delete_file"]["responses"]


async def test_every_operation_refuses_what_is_not_for_it(
    http: httpx.AsyncClient, server: RunningServer, contract: Contract
) -> None:
    async with httpx.AsyncClient(base_url=server.url) as stranger:
        for method, path, operation in contract.operations():
            name, sent = operation["operationId"], request(method, path, operation)
            if name in OPEN:
                continue
            refused(await stranger.request(**sent), 401, "Authorization", "unauthorized")
            misspelt = {**sent, "params": {**sent.get("params", {}), "recurisve": "1"}}
            refused(await http.request(**misspelt), 400, "recurisve", "invalid_request")
            if "{id}" in path:
                refused(await http.request(**sent), 404, "id", "not_found")
            elif "{approval_id}" in path or "{token_id}" in path:
                refused(await http.request(**sent), 404, "approval" if "approval" in path else "id", "not_found")
            if "json" in sent:
                refused(await http.request(**{**sent, "json": {**sent["json"], "colour": "red"}}), 400, "colour")
                refused(await http.request(**{**sent, "json": 7}), 400, "body")
                broken = {key: value for key, value in sent.items() if key != "json"}
                refused(await http.request(**broken, content=b'{"a": '), 400, "body")
                refused(await http.request(**broken, content=b" " * 1_100_000), 413, "body", "too_large")


async def test_no_route_and_no_method(http: httpx.AsyncClient, contract: Contract) -> None:
    for path in ("/", "/v1", "/v2/sandboxes", "/v1/sandboxes/", "/v1/sandboxes/a/nothing", "/redoc", "/docs/"):
        refused(await http.get(path), 404, "path", "not_found")
    for path in contract.document["paths"]:
        problem = refused(await http.patch(path.replace("{id}", "a").replace("{cid}", "c1")), 405, "method")
        assert problem["hint"].startswith("use ")


async def test_every_operation_on_an_ended_sandbox(http: httpx.AsyncClient, box: str, contract: Contract) -> None:
    assert (await http.post(f"{box}/terminate")).status_code == 200
    for method, path, operation in contract.operations():
        # Snapshots and events are of the workspace, which outlives its sandbox.
        of_workspace = {"get_sandbox", "get_usage", "stop", "terminate", "stream_context"} | {
            each["operationId"] for _, _, each in contract.operations() if each["tags"] == ["snapshots"]
        }
        if "{id}" in path and operation["operationId"] not in of_workspace:
            sent = request(method, path, operation, box.rpartition("/")[2])
            assert "new" in refused(await http.request(**sent), 409, "id", "not_running")["hint"]
    assert (await http.get(box)).json()["state"] == "terminated"


async def test_policy_can_deny_every_operation_on_a_sandbox(
    http: httpx.AsyncClient, server: RunningServer, box: str, contract: Contract, monkeypatch: pytest.MonkeyPatch
) -> None:
    decision = Verdict("deny", "nothing is allowed here", "everything", "a test", "ask nobody")
    monkeypatch.setattr(server.plane.policies, "decide", AsyncMock(return_value=decision))
    for method, path, operation in contract.operations():
        # What an MCP client does by the URL of a server is decided as what it does, not as connecting.
        changes = "{id}" in path and method != "GET"
        changes = changes and operation["operationId"] not in {"read_files", "connect_mcp_server"}
        if operation["operationId"] in {"deploy_or_resume", "put_policy", "delete_policy"} or changes:
            answer = await http.request(**request(method, path, operation, box.rpartition("/")[2]))
            problem = refused(answer, 403, None, "denied_by_policy")
            assert (problem["rule"], problem["retry"]) == ("everything", False)
