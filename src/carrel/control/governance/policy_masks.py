"""The part of a policy that holds inside a sandbox, and the policy that a fork gets."""

from __future__ import annotations

from dataclasses import replace

from carrel.control.governance.policies import Policies
from carrel.control.sessions.attachments import Attachment, Fork, LaunchPlan
from carrel.control.sessions.live import LiveSandbox
from carrel.control.sessions.masks import masks_of
from carrel.control.sessions.owners import is_agent, whose
from carrel.providers import Masks
from carrel.providers.base import Capability
from carrel.store import SessionRecord


class PolicyMasks(Attachment):
    """Masks programs and files that a policy denies."""

    def __init__(self, policies: Policies):
        self._policies = policies

    async def of(self, record: SessionRecord) -> Masks | None:
        """The masks of a session. A sandbox in which carrel builds something holds nothing to hide, and has none."""
        if not is_agent(record):
            return None
        return masks_of(await self._policies.of_record(record), whose(record))

    async def prepare(self, plan: LaunchPlan, workspace: str) -> LaunchPlan:
        """Add the masks; `Unsupported` where the provider cannot mask."""
        masks = await self.of(plan.record)
        if masks is not None:
            plan.provider.require(Capability.MASKS)
        return replace(plan, masks=masks)

    async def is_outdated(self, box: LiveSandbox) -> bool:
        """Masks are made when a sandbox starts."""
        return await self.of(box.record) != box.masks

    async def fork(self, fork: Fork) -> None:
        """Give a fork the policy of its origin."""
        fork.undo.push_async_callback(await self._policies.copy(fork.origin, fork.context_id))
