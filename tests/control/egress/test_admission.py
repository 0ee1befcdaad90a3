"""Outbound connections at the one admission: what the proxy asks, before any byte of it reaches the outside."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.sandboxes import until

from carrel.audit import Filter, chain_of
from carrel.control.operations.call import Call
from carrel.control.operations.caller import Caller
from carrel.control.plane import ControlPlane
from carrel.errors import ApprovalNeeded, Denied
from carrel.identity import Identity, OwnerKind, Scope
from carrel.models import ApprovalDecision, ApprovalInfo, ApprovalState, PolicyDocuments
from carrel.models.operations import CONNECT
from carrel.policy.verdict import Verdict

PERSON = Identity("person:ann", OwnerKind.PERSON, frozenset({Scope.APPROVE}))
SANDBOX = Identity("sandbox:sbx-1", OwnerKind.AGENT, frozenset())
ASKS = Verdict("ask", "no rule allows or denies a.example")
DENY = PolicyDocuments(settings={"permissions": {"deny": ["network(outbound:a.example)"]}})
ALLOW = PolicyDocuments(settings={"permissions": {"allow": ["network(outbound:a.example)"]}})


async def connect(plane: ControlPlane, wait_s: float = 0.0) -> str | None:
    """Ask for a connection to a host as the proxy does; the approval that it may open under."""
    arguments = {"host": "a.example", "port": 443}
    call = Call(CONNECT, arguments, Caller(SANDBOX, wait_s=wait_s), "sbx-1", "c", proxy_verdict=ASKS)
    async with plane.egress._admission.admit(call) as admitted:
        return admitted.approval


async def waiting(plane: ControlPlane) -> ApprovalInfo:
    async def found() -> ApprovalInfo | None:
        page = await plane.approvals.page(states=[ApprovalState.PENDING])
        return page.items[0] if page.items else None

    return await until(found, what="an approval")  # type: ignore[no-any-return]


async def test_admission_asks_where_the_proxy_asks_even_without_a_policy(plane: ControlPlane) -> None:
    with pytest.raises(ApprovalNeeded) as needed:
        await connect(plane)
    assert needed.value.approval is not None
    await plane.decisions.decide(Caller(PERSON), needed.value.approval, ApprovalDecision(approve=True))
    assert await connect(plane) == needed.value.approval
    with pytest.raises(ApprovalNeeded):  # it was approved once
        await connect(plane)


async def test_admission_is_not_milder_than_the_proxy_when_its_own_policy_allows(plane: ControlPlane) -> None:
    await plane.policy_changes.put("c", ALLOW, "person:ann")
    with pytest.raises(ApprovalNeeded):
        await connect(plane)


async def test_admission_denies_what_its_own_policy_denies_without_asking(plane: ControlPlane) -> None:
    await plane.policy_changes.put("c", DENY, "person:ann")
    with pytest.raises(Denied) as refused:
        await connect(plane)
    assert refused.value.extra["rule"] == "network(outbound:a.example)"
    assert not (await plane.approvals.page()).items


async def test_policy_that_denies_while_a_person_is_asked_beats_the_approval(plane: ControlPlane) -> None:
    asking = asyncio.create_task(connect(plane, wait_s=60))
    approval = await waiting(plane)
    await plane.policy_changes.put("c", DENY, "person:ann")
    await plane.decisions.decide(Caller(PERSON), approval.id, ApprovalDecision(approve=True))
    with pytest.raises(Denied) as refused:
        await asking
    assert refused.value.extra["rule"] == "network(outbound:a.example)"
    assert (await plane.approvals.get(approval.id)).state is ApprovalState.APPROVED


async def test_admission_leaves_the_record_to_the_log_of_the_proxy(plane: ControlPlane) -> None:
    with pytest.raises(ApprovalNeeded) as needed:
        await connect(plane)
    await plane.decisions.decide(Caller(PERSON), needed.value.approval or "", ApprovalDecision(approve=True))
    await connect(plane)
    await plane.audit.flush()
    assert not (await plane.audit.search(Filter(chain=chain_of("c"), kind="network"), limit=10)).items
