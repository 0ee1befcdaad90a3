"""Decisions of people on approvals. Each is an operation of its own: it passes admission and is audited."""

from __future__ import annotations

from typing import Protocol

from carrel.control.governance.approvals import Approvals, Redact
from carrel.control.operations.admission import Admission
from carrel.control.operations.call import Call
from carrel.control.operations.caller import Caller
from carrel.errors import CarrelError, InvalidRequest
from carrel.identity import Identity, may_decide
from carrel.models import ApprovalBatch, ApprovalBatchResult, ApprovalDecision, ApprovalInfo, ApprovalScope
from carrel.models.operations import DECIDE_APPROVAL
from carrel.store.approvals import ApprovalRecord


class RuleChanges(Protocol):
    """Adds rules to the policy of a context."""

    async def check_rule(self, context_id: str, rule: str) -> None:
        """Refuse a rule that could not be added."""

    async def add_rule(self, context_id: str, rule: str, by: str) -> None:
        """Allow something in a context from now on."""


class ApprovalDecisions:
    """Approves and denies."""

    def __init__(self, approvals: Approvals, admission: Admission, rules: RuleChanges, redact: Redact):
        self._approvals = approvals
        self._admission = admission
        self._rules = rules
        self._redact = redact

    async def decide(self, caller: Caller, approval_id: str, decision: ApprovalDecision) -> ApprovalInfo:
        """Approve or deny; `Denied` for a caller who may not, `Conflict` when it is decided or has expired."""
        record = await self._approvals.known(approval_id)
        arguments = {"approval": approval_id, **decision.model_dump(mode="json", exclude_none=True)}
        call = Call(DECIDE_APPROVAL, arguments, caller, record.sandbox_id, record.context_id)
        async with self._admission.admit(call):
            return await self._decide(record, decision, caller.identity)

    async def _decide(self, record: ApprovalRecord, decision: ApprovalDecision, by: Identity) -> ApprovalInfo:
        refused = may_decide(by, record.requested_by, record.context_id)
        if refused is not None:
            raise refused
        if decision.approve and decision.scope is not ApprovalScope.ONCE and record.context_id is None:
            raise InvalidRequest(
                "an ephemeral sandbox has no context to approve this for", field="scope", hint="approve it once"
            )
        rule = decision.rule if decision.approve and decision.scope is ApprovalScope.RULE else None
        if decision.approve and decision.scope is ApprovalScope.RULE and not rule:
            raise InvalidRequest("this scope needs a rule", field="rule", hint="for example shell(git push:*)")
        if rule is not None:
            await self._rules.check_rule(record.context_id or "", rule)
        shown = await self._redact(record.owner, {"message": decision.message})
        message = None if decision.message is None else str(shown["message"])
        found = await self._approvals.settle_decision(record.id, decision, by.subject, rule, message)
        try:
            if rule is not None:  # only now: somebody else may have denied it meanwhile
                await self._rules.add_rule(record.context_id or "", rule, by.subject)
        except CarrelError as error:
            error.hint = "the request is approved, once; add the rule to the policy of its context"
            raise
        finally:
            self._approvals.wake()
        return found.info()

    async def decide_all(self, caller: Caller, batch: ApprovalBatch) -> ApprovalBatchResult:
        """Decide several approvals alike; one that cannot be decided does not stop the others."""
        result = ApprovalBatchResult(decided=[])
        for approval_id in dict.fromkeys(batch.ids):
            try:
                result.decided.append(await self.decide(caller, approval_id, batch.decision))
            except CarrelError as error:
                result.refused[approval_id] = str(error)
        return result
