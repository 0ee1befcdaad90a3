"""Deletes a context with all its data and its rules. The audit log stays.

For administrators only: the API checks the caller.
"""

from __future__ import annotations

from typing import Protocol

from carrel.control.governance.policies import Policies
from carrel.control.governance.policy_changes import PolicyChanges
from carrel.control.operations.caller import Caller
from carrel.control.operations.operations import Operations
from carrel.control.secrets.service import SecretService
from carrel.control.sessions.sessions import Sessions
from carrel.control.workspaces.filespace_files import FilespaceFiles
from carrel.control.workspaces.workspaces import Workspaces
from carrel.errors import NotFound
from carrel.events import EventLog
from carrel.models.operations import FORGET_CONTEXT
from carrel.store import SessionStore


class JobsOfContext(Protocol):
    """Ends and removes the jobs of a context."""

    async def cancel_all(self, caller: Caller, context_id: str) -> bool:
        """Cancel the jobs of a context that have not ended; return whether it has any jobs."""

    async def remove_all(self, context_id: str) -> None:
        """Remove the jobs of a context with their output, once they have ended."""


class ContextDeletion:
    """Knows all the data that a context can have."""

    def __init__(
        self,
        sessions: Sessions,
        operations: Operations,
        workspaces: Workspaces,
        store: SessionStore,
        policies: Policies,
        changes: PolicyChanges,
        secrets: SecretService,
        files: FilespaceFiles,
        events: EventLog,
        jobs: JobsOfContext,
    ):
        self._jobs = jobs
        self._events = events
        self._sessions = sessions
        self._operations = operations
        self._workspaces = workspaces
        self._store = store
        self._policies = policies
        self._secrets = secrets
        self._changes = changes
        self._files = files

    async def forget(self, caller: Caller, context_id: str) -> None:
        """End the session of a context and delete all its data; `NotFound` when there is none."""
        async with self._operations.admit(caller, FORGET_CONTEXT, {}, context_id=context_id):
            if not await self._jobs.cancel_all(caller, context_id) and not await self._known(context_id):
                raise NotFound(
                    f"nothing is known of a context '{context_id[:128]}'",
                    field="context_id",
                    hint="`carrel ps --all` shows contexts, terminated ones too",
                )
            await self._sessions.delete(caller, context_id, "forgotten")
            await self._jobs.remove_all(context_id)
            await self._files.erase(context_id)
            await self._events.forget(context_id)
            await self._changes.delete(context_id)  # last: its rules hold until everything else is gone

    async def _known(self, context_id: str) -> bool:
        newest = await self._store.newest_of_context(context_id)
        if (newest is not None and not newest.forgotten) or await self._workspaces.exists(context_id):
            return True
        policy = await self._policies.get(context_id)
        if policy.settings is not None or policy.sources is not None:
            return True
        if (await self._secrets.list(context_id)).items:
            return True
        return await self._files.holds(context_id)
