"""Brings the limits of a session within its policy, and refuses a request that asks for more."""

from __future__ import annotations

from dataclasses import replace

from carrel.control.governance.policies import Policies
from carrel.control.sessions.attachments import Attachment, LaunchPlan
from carrel.errors import LimitExceeded


class PolicyLimits(Attachment):
    """The limits that policies set: memory and time."""

    def __init__(self, policies: Policies):
        self._policies = policies

    async def plan(self, plan: LaunchPlan) -> LaunchPlan:
        """Lower the limits that are above the policy's; `LimitExceeded` when they were asked for."""
        record, asked = plan.record, plan.request.limits
        policy = await self._policies.of_record(record)
        caps = {
            "memory_mb": policy.limits.max_memory_mb,
            "timeout_s": policy.limits.max_execution_time_seconds,
        }
        changes: dict[str, int] = {}
        for name, most in caps.items():
            given, now = getattr(asked, name), getattr(record.limits, name)
            if most is not None and given is not None and given > most:
                raise LimitExceeded(
                    f"the policy of this context allows {name} = {most} at most",
                    field=f"limits.{name}",
                    hint="ask for less, or let the sources of the policy be changed",
                )
            if most is not None and now is not None and now > most:
                changes[name] = most
        if not changes:
            return plan
        return replace(plan, record=replace(record, limits=record.limits.model_copy(update=changes)))
