from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.calls import ADMIN

from carrel.audit import Filter
from carrel.config import Settings
from carrel.control.operations.caller import Caller
from carrel.control.plane import ControlPlane
from carrel.errors import Conflict, NotFound
from carrel.identity import Identity, OwnerKind, Scope
from carrel.models import McpServerRequest, PolicyDocuments, SandboxRequest, TerminateRequest

AGENT = Identity("agent:a", OwnerKind.AGENT, frozenset({Scope.OPERATE}))
RULES = {"permissions": {"deny": ["shell(curl:*)"]}}


@pytest.fixture
def templates(settings: Settings) -> None:
    for name in ("first", "second"):
        folder = Path(settings.data_dir) / "templates" / name
        folder.mkdir(parents=True)
        (folder / "template.toml").write_text(f'env = {{ MADE_BY = "{name}" }}\n')


async def test_a_deleted_context_may_have_another_template(templates: None, plane: ControlPlane) -> None:
    caller = Caller(AGENT)
    first, second = (SandboxRequest(context_id="c", template=name) for name in ("first", "second"))
    await plane.operations.deploy_or_resume(caller, first)
    await plane.operations.terminate(caller, "c", TerminateRequest())
    with pytest.raises(Conflict):
        await plane.operations.deploy_or_resume(caller, second)
    assert (await plane.operations.deploy_or_resume(caller, SandboxRequest(context_id="c")))[0].template == "first"
    await plane.operations.terminate(caller, "c", TerminateRequest(delete_files=True))
    assert await plane.templates.of("c") is None
    assert (await plane.operations.deploy_or_resume(caller, second))[0].template == "second"
    await plane.operations.terminate(caller, "c", TerminateRequest(delete_files=True))
    assert (await plane.operations.deploy_or_resume(caller, SandboxRequest(context_id="c")))[0].template is None


async def test_a_deleted_context_keeps_its_policy_and_forgets_the_rest(plane: ControlPlane) -> None:
    await plane.policy_changes.put("c", PolicyDocuments(settings=RULES), "person:ann")
    caller = Caller(AGENT)
    await plane.operations.deploy_or_resume(caller, SandboxRequest(context_id="c", filespace=True))
    await plane.mcp.add(caller, "c", "notes", McpServerRequest(command=["true"]))
    await plane.secrets.put("c", "KEY", b"open-sesame")
    await plane.operations.terminate(caller, "c", TerminateRequest(delete_files=True))
    info, _ = await plane.operations.deploy_or_resume(caller, SandboxRequest(context_id="c"))
    assert not info.filespace
    assert (await plane.mcp.list(caller, "c")).items == [] and (await plane.secrets.list("c")).items == []
    assert (await plane.policies.get("c")).settings == RULES, "an agent does not get rid of its rules"


async def test_forget_leaves_nothing_but_the_audit_log(plane: ControlPlane) -> None:
    await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    await plane.secrets.put("c", "KEY", b"open-sesame")
    await plane.filespaces.write(ADMIN, "c", "kept", b"x")
    await plane.snapshots.take(ADMIN, "c")
    await plane.policy_changes.put("c", PolicyDocuments(settings=RULES), "person:ann")
    await plane.context_deletion.forget(ADMIN, "c")
    assert (await plane.policies.get("c")).settings is None and (await plane.secrets.list("c")).items == []
    assert (await plane.filespaces.list(ADMIN, "c")).items == [] and not await plane.workspaces.exists("c")
    assert (await plane.workspaces._store.page("c", limit=9))[0] == []
    with pytest.raises(NotFound):
        await plane.sessions.record("c")
    with pytest.raises(NotFound, match="nothing is known"):
        await plane.context_deletion.forget(ADMIN, "c")
    await plane.audit.flush()
    assert "forget_context" in [each.name for each in (await plane.audit.search(Filter(), limit=100)).items]


@pytest.mark.parametrize("left", ["policy", "secret", "filespace"])
async def test_what_was_kept_without_a_session_is_forgotten(plane: ControlPlane, left: str) -> None:
    if left == "policy":
        await plane.policy_changes.put("c", PolicyDocuments(settings=RULES), "person:ann")
    elif left == "secret":
        await plane.secrets.put("c", "KEY", b"open-sesame")
    else:
        await plane.filespaces.write(ADMIN, "c", "kept", b"x")
    await plane.context_deletion.forget(ADMIN, "c")
    with pytest.raises(NotFound):
        await plane.context_deletion.forget(ADMIN, "c")
