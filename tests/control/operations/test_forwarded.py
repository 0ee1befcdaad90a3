"""An operation on files is added by its row alone: nothing else of the control plane or the API knows it."""

from __future__ import annotations

import httpx
import pytest
from starlette.applications import Starlette
from starlette.types import Receive, Send
from tests.support.calls import ADMIN, caller_named

from carrel.api.files import add_route
from carrel.api.guard import GuardedRouter, OperationRoute
from carrel.api.parts import CALLER
from carrel.audit import Filter, chain_of
from carrel.control.plane import ControlPlane
from carrel.errors import Denied, InvalidPath
from carrel.models import PolicyDocuments, SandboxRequest
from carrel.models.files import FileInfo, StatRequest
from carrel.models.operations import OPERATIONS, READS, ForwardedOperation, Scope

MEASURE = ForwardedOperation(
    "measure",
    "file",
    Scope.READ,
    "GET /v1/sandboxes/{id}/files/measure",
    "measure_file",
    decides=READS,
    supervisor="GET /files/stat",
    request=StatRequest,
    result=FileInfo,
    arguments=lambda request: {"path": request.path},
    summary="How large a file is",
    description="In bytes.",
)
POLICY = PolicyDocuments(
    settings={"permissions": {"allow": ["file(read:${WORKSPACE}/**)"], "deny": ["file(read:${WORKSPACE}/x)"]}}
)


async def test_row_is_decided_forwarded_validated_and_recorded(plane: ControlPlane) -> None:
    caller = caller_named("agent:coder")
    await plane.sessions.deploy_or_resume(caller, SandboxRequest(context_id="c"))
    for name in ("a", "x"):
        await plane.operations.write_file(caller, "c", name, b"12345")
    await plane.policy_changes.put("c", POLICY, "person:ann")
    assert (await plane.operations.forward(caller, MEASURE, "c", StatRequest(path="a"))).size == 5
    with pytest.raises(Denied):
        await plane.operations.forward(caller, MEASURE, "c", StatRequest(path="x"))
    with pytest.raises(InvalidPath):
        await plane.operations.forward(caller, MEASURE, "c", StatRequest(path="a\0b"))
    await plane.audit.flush()
    page = await plane.audit.search(Filter(chain=chain_of("c"), name="measure"), limit=10)
    assert [(record.kind, record.decision, record.result) for record in page.items] == [
        ("file", "deny", "denied_by_policy"),
        ("file", "allow", "ok"),
    ]


async def test_row_gets_a_guarded_route(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    await plane.operations.write_file(ADMIN, "c", "a", b"12345")
    monkeypatch.setitem(OPERATIONS, MEASURE.id, MEASURE)  # type: ignore[misc]
    router = GuardedRouter(tags=["files"])
    add_route(router, MEASURE)
    app = Starlette(routes=router.routes)
    app.state.plane = plane
    callers = [ADMIN]

    async def gate(scope: dict[str, object], receive: Receive, send: Send) -> None:
        await app({**scope, CALLER: callers[-1]}, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://test") as http:
        answer = await http.get("/v1/sandboxes/c/files/measure", params={"path": "a"})
        assert (answer.status_code, answer.json()["size"]) == (200, 5)
        callers.append(caller_named("agent:coder", scopes=frozenset()))
        with pytest.raises(Denied, match="scope"):
            await http.get("/v1/sandboxes/c/files/measure", params={"path": "a"})
    [route] = router.routes
    assert isinstance(route, OperationRoute)
    assert (route.built.operation_id, route.built.summary) == ("measure_file", "How large a file is")
