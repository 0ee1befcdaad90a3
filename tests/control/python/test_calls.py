"""Python through the one door."""

from __future__ import annotations

import pytest
from tests.support.calls import ADMIN

from carrel.audit import Filter, chain_of
from carrel.control.plane import ControlPlane
from carrel.errors import ApprovalNeeded, Denied, InvalidRequest, NotFound
from carrel.models import ExecuteRequest, PolicyDocuments, PythonRequest, SandboxRequest, ToolRequest


@pytest.fixture
async def box(plane: ControlPlane) -> str:
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    return "c"


def policy(*allow: str, deny: tuple[str, ...] = ()) -> PolicyDocuments:
    return PolicyDocuments(settings={"permissions": {"allow": list(allow), "deny": list(deny)}})


async def test_a_policy_that_denies_the_interpreter_denies_this_too(plane: ControlPlane, box: str) -> None:
    do = plane
    await plane.policy_changes.put("c", policy("shell(echo:*)", deny=("shell(python3:*)",)), "ann")
    request = PythonRequest(code="print(1)")
    with pytest.raises(Denied) as refused:
        await do.python.run(ADMIN, box, request)
    assert refused.value.extra["rule"] == "shell(python3:*)"
    with pytest.raises(Denied):
        await do.python.start(ADMIN, box, request)
    with pytest.raises(Denied):
        await do.tools.execute(ADMIN, box, ExecuteRequest(code="print(1)", language="python"))
    with pytest.raises(Denied):
        await do.tools.call(ADMIN, box, ToolRequest(tool_name="python_exec", params={"code": "print(1)"}))


async def test_what_policy_does_not_name_asks(plane: ControlPlane, box: str) -> None:
    await plane.policy_changes.put("c", policy("shell(echo:*)"), "ann")
    with pytest.raises(ApprovalNeeded):
        await plane.python.run(ADMIN, box, PythonRequest(code="print(1)"))


async def test_files_that_come_with_a_call_are_decided(plane: ControlPlane, box: str) -> None:
    rules = policy("shell(python3:*)", "file(write:${WORKSPACE}/in/**)", deny=("file(write:${WORKSPACE}/kept)",))
    await plane.policy_changes.put("c", rules, "ann")
    ran = await plane.python.run(ADMIN, box, PythonRequest(code="print(1)", files={"in/a": ""}))
    assert ran.stdout == "1\n"
    with pytest.raises(Denied):
        await plane.python.run(ADMIN, box, PythonRequest(code="print(1)", files={"kept": ""}))


async def test_the_audit_log_has_the_code_without_secrets(plane: ControlPlane, box: str) -> None:
    await plane.secrets.put("c", "KEY", b"very-secret-value")
    code = "print('very-secret-value')\n" + "x = 1\n" * 10_000
    result = await plane.python.run(ADMIN, box, PythonRequest(code=code))
    assert result.stdout == "[secret:KEY]\n"
    await plane.audit.flush()
    page = await plane.audit.search(Filter(chain=chain_of("c"), name="python_exec"), limit=10)
    record = page.items[0]
    shown = str(record.arguments)
    assert "print(" in shown and "very-secret-value" not in shown and len(shown) < len(code)
    assert record.arguments_hash


async def test_limits(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(
        ADMIN, SandboxRequest.model_validate({"context_id": "s", "limits": {"timeout_s": 0.5}})
    )
    result = await plane.python.run(ADMIN, "s", PythonRequest(code="import time; time.sleep(60)"))
    assert result.timed_out
    with pytest.raises(InvalidRequest):
        await plane.python.run(ADMIN, "s", PythonRequest(code="1", interactive=True))
    with pytest.raises(InvalidRequest):
        await plane.tools.execute(ADMIN, "s", ExecuteRequest(code="1", language="python", timeout=121))
    with pytest.raises(NotFound):
        await plane.python.run(ADMIN, "s", PythonRequest(code="1", env="none-such"))
