"""Names: which carrel context and which threads belong to an A2A context and its tasks. Pure.

A conversation is one thread, named as its carrel context. A task runs on a thread of its own beside it, so that tasks
of one context run at once and none writes into another's checkpoints.
"""

from __future__ import annotations

import hashlib
import re

from carrel.errors import InvalidRequest

LONGEST = 255
"""Characters of an A2A context id."""
_CARREL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_OTHER = re.compile(r"[^A-Za-z0-9._-]+")


def carrel_context(context_id: str) -> str:
    """The carrel context of an A2A context: of the same name where carrel takes it, else a readable one of its own."""
    if _CARREL.fullmatch(context_id):
        return context_id
    if not context_id or len(context_id) > LONGEST:
        raise InvalidRequest(f"a context id has 1 to {LONGEST} characters", field="contextId")
    readable = _OTHER.sub("-", context_id).strip("-.")[:64]
    digest = hashlib.sha256(context_id.encode("utf-8", "surrogatepass")).hexdigest()[:24]
    return f"a2a-{readable}-{digest}" if readable else f"a2a-{digest}"


def conversation(context: str) -> str:
    """The thread of a conversation."""
    return context


def task_thread(context: str, task_id: str) -> str:
    """The thread of one task: no carrel context has a slash, so that it is nobody's conversation."""
    return f"{context}/{task_id}"
