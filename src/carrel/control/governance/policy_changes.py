"""Changes of policies. Admission follows a new policy at once; running sandboxes are refreshed or restarted."""

from __future__ import annotations

from carrel.control.governance.policies import Policies
from carrel.control.operations.caller import OWN_WORK
from carrel.control.sessions.attachments import Attachments
from carrel.control.sessions.live import LiveSandbox, LiveSandboxes
from carrel.control.sessions.sessions import Sessions
from carrel.models import PolicyDocuments, PolicyInfo, SandboxRequest


class PolicyChanges:
    """The only way to change the policy of a context."""

    def __init__(self, policies: Policies, live: LiveSandboxes, attachments: Attachments, sessions: Sessions):
        self._policies = policies
        self._live = live
        self._attachments = attachments
        self._sessions = sessions

    async def put(self, context_id: str, given: PolicyDocuments, by: str) -> PolicyInfo:
        """Change the policy of a context. Masks of a running sandbox change only with a restart, which is done if
        requested.
        """
        info = await self._policies.write(context_id, given, by)
        await self._refresh(context_id)
        box = self._running(context_id)
        if box is None or not await self._attachments.are_outdated(box):
            return info
        if not given.restart:
            return info.model_copy(update={"restart_needed": True})
        await self._sessions.stop(box.record.id, "its policy was changed")
        await self._sessions.deploy_or_resume(OWN_WORK, SandboxRequest(context_id=context_id))
        return info

    async def delete(self, context_id: str) -> None:
        """Delete the policy of a context: from now on it has the policy of the server."""
        await self._policies.erase(context_id)
        await self._refresh(context_id)

    async def check_rule(self, context_id: str, rule: str) -> None:
        """Refuse a rule that could not be added."""
        await self._policies.check_rule(context_id, rule)

    async def add_rule(self, context_id: str, rule: str, by: str) -> None:
        """Allow something in a context from now on."""
        await self._policies.add_rule(context_id, rule, by)
        await self._refresh(context_id)

    def _running(self, context_id: str) -> LiveSandbox | None:
        return next((box for box in self._live.all() if box.record.context_id == context_id), None)

    async def _refresh(self, context_id: str) -> None:
        box = self._running(context_id)
        if box is not None:
            await self._attachments.refresh([box])
