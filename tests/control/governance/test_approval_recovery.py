from __future__ import annotations

import pytest
from tests.support.calls import ADMIN
from tests.support.governed import POLICY

from carrel.audit import Filter, chain_of
from carrel.control.governance.approval_recovery import recover_approvals
from carrel.control.operations.caller import Caller
from carrel.control.plane import ControlPlane
from carrel.control.sessions.live import LiveSandbox
from carrel.errors import ApprovalNeeded, PlatformError
from carrel.identity import Identity, OwnerKind, Scope
from carrel.models import ApprovalDecision, CommandRequest, PolicyDocuments, SandboxRequest

AGENT = Identity("agent:coder", OwnerKind.AGENT, frozenset({Scope.OPERATE}))
PERSON = Identity("person:ann", OwnerKind.PERSON, frozenset({Scope.APPROVE}))
ASKED = CommandRequest(command="uname")


async def _approved(plane: ControlPlane) -> tuple[str, LiveSandbox]:
    """What somebody approved, and the sandbox it is for."""
    caller = Caller(AGENT)
    await plane.policy_changes.put("c", PolicyDocuments(settings=POLICY), "person:ann")
    info, _ = await plane.operations.deploy_or_resume(caller, SandboxRequest(context_id="c"))
    with pytest.raises(ApprovalNeeded) as caught:
        await plane.operations.run_command(caller, "c", ASKED)
    handle = caught.value.approval or ""
    await plane.decisions.decide(Caller(PERSON), handle, ApprovalDecision(approve=True))
    return handle, next(box for box in plane.sessions.live() if box.record.id == info.id)


async def _taken(plane: ControlPlane, handle: str, place: str) -> None:
    """As a server leaves it that is killed right after."""
    assert await plane._approval_store.use(handle, 1.0, run="left", node=plane.node, place=place)


async def _settled(plane: ControlPlane) -> tuple[int, dict[str, object]]:
    """How many can be used again, and what the log says of the last."""
    given = await recover_approvals(plane._approval_store, plane.sessions.live(), plane.audit, plane.node)
    await plane.audit.flush()
    page = await plane.audit.search(Filter(chain_of("c"), name="recover_approval"), limit=1)
    return given, page.items[0].arguments


async def test_what_was_not_begun_is_given_back_and_runs(plane: ControlPlane) -> None:
    handle, box = await _approved(plane)
    await _taken(plane, handle, box.instance)
    assert await _settled(plane) == (1, {"approval": handle, "begun": "no", "given_back": True})
    assert (await plane.operations.run_command(Caller(AGENT, approval=handle), "c", ASKED)).ok
    assert await plane._approval_store.runs(plane.node) == []
    assert (await plane.approvals.get(handle)).used_at is not None


async def test_where_nobody_can_tell_it_stays_used(plane: ControlPlane) -> None:
    """The sandbox it was for is gone; that there is another one of the same session says nothing."""
    handle, box = await _approved(plane)
    await _taken(plane, handle, box.instance)
    await plane.sessions.stop("c", "gone")
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    assert box.instance not in {each.instance for each in plane.sessions.live()}
    assert await _settled(plane) == (0, {"approval": handle, "begun": "unknown", "given_back": False})
    assert (await plane.approvals.get(handle)).used_at is not None
    assert await recover_approvals(plane._approval_store, plane.sessions.live(), plane.audit, plane.node) == 0, (
        "that is settled"
    )


async def test_what_another_server_runs_is_left_alone(plane: ControlPlane) -> None:
    handle, box = await _approved(plane)
    assert await plane._approval_store.use(handle, 1.0, run="left", node="other", place=box.instance)
    assert await recover_approvals(plane._approval_store, plane.sessions.live(), plane.audit, plane.node) == 0
    assert [each.id for each in await plane._approval_store.runs("other")] == [handle]


async def test_what_could_not_be_recorded_is_not_used_up(plane: ControlPlane) -> None:
    handle, _ = await _approved(plane)
    await plane.audit.close()
    with pytest.raises(PlatformError, match="closed"):
        await plane.operations.run_command(Caller(AGENT, approval=handle), "c", ASKED)
    assert (await plane.approvals.get(handle)).used_at is None
