"""The parts of a policy that are enforced inside a sandbox: its limits and its masks."""

from __future__ import annotations

from dataclasses import replace

from carrel.control.governance.policies import Policies
from carrel.control.sessions.attachments import Attachment, Fork, LaunchPlan
from carrel.control.sessions.live import LiveSandbox
from carrel.control.sessions.masks import masks_of
from carrel.control.sessions.owners import is_agent
from carrel.errors import LimitExceeded
from carrel.providers import Masks
from carrel.providers.base import Capability
from carrel.store import SessionRecord


class PolicyLimits(Attachment):
    """The limits that policies set: memory and time."""

    def __init__(self, policies: Policies):
        self._policies = policies

    async def plan(self, plan: LaunchPlan) -> LaunchPlan:
        """Lower the limits that are above the policy's; `LimitExceeded` when they were asked for."""
        record, asked = plan.record, plan.request.limits
        policy = await self._policies.of_record(record)
        caps = {"memory_mb": policy.limits.max_memory_mb, "timeout_s": policy.limits.max_execution_time_seconds}
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


class PolicyMasks(Attachment):
    """Masks programs and files that a policy denies."""

    def __init__(self, policies: Policies):
        self._policies = policies

    async def of(self, record: SessionRecord) -> Masks | None:
        """Return the masks of a session. A sandbox in which carrel builds something has nothing to hide, so it has
        none.
        """
        if not is_agent(record):
            return None
        return masks_of(await self._policies.of_record(record), record.workspace_path)

    async def prepare(self, plan: LaunchPlan, workspace: str) -> LaunchPlan:
        """Add the masks; `Unsupported` where the provider cannot mask."""
        masks = await self.of(plan.record)
        if masks is not None:
            plan.provider.require(Capability.MASKS)
        return replace(plan, masks=masks)

    async def is_outdated(self, box: LiveSandbox) -> bool:
        """Whether the masks would differ after a restart."""
        return await self.of(box.record) != box.masks

    async def fork(self, fork: Fork) -> None:
        """Give a fork the policy of its origin."""
        fork.undo.push_async_callback(await self._policies.copy(fork.caller, fork.origin, fork.context_id))
