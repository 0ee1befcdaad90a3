"""The carrel context and the LangGraph threads of an A2A context and its tasks. Pure.

The conversation of a context is the thread with the name of its carrel context. Each task runs on a thread of its own,
so that tasks of one context run at the same time and do not write into each other's checkpoints.
"""

from __future__ import annotations

import hashlib
import re

from carrel.errors import InvalidRequest

LONGEST = 255
"""The longest A2A context id, in characters."""
_CARREL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_OTHER = re.compile(r"[^A-Za-z0-9._-]+")


def carrel_context(context_id: str) -> str:
    """Return the carrel context of an A2A context: the same name if carrel allows it, else one derived from it."""
    if _CARREL.fullmatch(context_id):
        return context_id
    if not context_id or len(context_id) > LONGEST:
        raise InvalidRequest(f"a context id must have 1 to {LONGEST} characters", field="contextId")
    readable = _OTHER.sub("-", context_id).strip("-.")[:64]
    digest = hashlib.sha256(context_id.encode("utf-8", "surrogatepass")).hexdigest()[:24]
    return f"a2a-{readable}-{digest}" if readable else f"a2a-{digest}"


def task_thread(context: str, task_id: str) -> str:
    """Return the thread of one task. No carrel context has a slash, so it cannot be a conversation."""
    return f"{context}/{task_id}"
