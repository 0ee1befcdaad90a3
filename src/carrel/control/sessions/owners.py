"""Whose agent runs in a sandbox, and who owns its workspace: most run the agent of their context; some are made by
carrel for its own work.
"""

from __future__ import annotations

from dataclasses import replace

from carrel.control.operations.caller import OwnWork
from carrel.control.sessions.attachments import Attachment, LaunchPlan
from carrel.identity import OwnerKind
from carrel.store import SessionRecord

LABEL, DISCOVERS = "carrel", "mcp"
"""The label of a sandbox in which carrel asks an MCP server of a context for its catalogue."""
BUILDS_IMAGE = "image"
"""The label of a sandbox that runs a line of a Dockerfile. Its root can be changed."""
STATELESS = "carrel.router"
"""The label of a sandbox for calls without a context."""


def whose(record: SessionRecord) -> str | None:
    """Return the context whose agent runs in a sandbox. A sandbox that asks an MCP server counts as the agent's; one
    that builds packages does not.
    """
    if record.acts_for and record.labels.get(LABEL) == DISCOVERS:
        return record.acts_for
    return record.context_id


def discovers(record: SessionRecord) -> bool:
    """Whether carrel made a sandbox to ask an MCP server for its catalogue."""
    return record.context_id is None and whose(record) is not None


def builds_image(record: SessionRecord) -> bool:
    """Whether carrel made a sandbox to run a line of a Dockerfile."""
    return record.acts_for is not None and record.labels.get(LABEL) == BUILDS_IMAGE


def is_agent(record: SessionRecord) -> bool:
    """Whether a sandbox runs code of the agent, and not only builds of carrel."""
    return record.acts_for is None or discovers(record)


class WorkspaceOwner(Attachment):
    """The agent that owns a workspace: the one that made it."""

    async def plan(self, plan: LaunchPlan) -> LaunchPlan:
        """Set the agent: the previous one; else the calling agent or service, by the name of its token; else, for a
        person and for carrel itself, the template.
        """
        caller, previous = plan.caller, plan.previous
        if previous is not None and not previous.forgotten and previous.agent is not None:
            agent: str | None = previous.agent
        elif isinstance(caller, OwnWork) or caller.identity.kind is OwnerKind.PERSON:
            agent = plan.record.template
        else:
            agent = caller.identity.subject.partition(":")[2] or None
        return replace(plan, record=replace(plan.record, agent=agent))
