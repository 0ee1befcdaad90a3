"""Whose agent runs in a sandbox: most run the agent of their context; some are made by carrel for its own work."""

from __future__ import annotations

from carrel.store import SessionRecord

LABEL, DISCOVERS = "carrel", "mcp"
"""The label of a sandbox in which carrel asks an MCP server of a context for its catalogue."""
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


def is_agent(record: SessionRecord) -> bool:
    """Whether a sandbox runs code of the agent, and not only builds of carrel."""
    return record.acts_for is None or discovers(record)
