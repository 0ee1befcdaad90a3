"""Reads what a caller's message says: the text for the graph, and a decision about what waits. Pure.

A decision is read strictly: nothing is approved by a text that says more than that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from a2a.helpers import get_data_parts, get_text_parts
from a2a.types.a2a_pb2 import Message

from carrel.errors import InvalidRequest

LONGEST_TEXT = 200_000
LONGEST_REASON = 2000
_APPROVE = frozenset({"approve", "approved", "allow", "yes"})
_DENY = frozenset({"deny", "denied", "refuse", "reject", "no"})
_ID = re.compile(r"apr-[A-Za-z0-9-]{1,60}")
_FIRST = re.compile(r"\s*([A-Za-z]+)\b[\s,.:;!-]*(.*)", re.DOTALL)


@dataclass(frozen=True)
class Decision:
    """What a person said of something that waits. Without `approval` it is about the only thing that waits."""

    decision: Literal["approve", "deny"]
    approval: str | None = None
    message: str | None = None


def text_of(message: Message) -> str:
    """What the graph is asked to do. Data goes with it as JSON; files are not taken."""
    for part in message.parts:
        if part.WhichOneof("content") not in {"text", "data"}:
            raise InvalidRequest(
                "this agent takes text and data",
                field="parts",
                hint="write files into the workspace with the carrel SDK, then name them in the text",
            )
    pieces = [*get_text_parts(message.parts)]
    pieces += [json.dumps(value, ensure_ascii=False) for value in get_data_parts(message.parts)]
    text = "\n".join(pieces)
    if not text.strip():
        raise InvalidRequest("the message has no text", field="parts", hint="say what to do in a text part")
    if len(text) > LONGEST_TEXT:
        raise InvalidRequest(f"the message is longer than {LONGEST_TEXT} characters", field="parts")
    return text


def decision_of(message: Message) -> Decision | None:
    """The decision a message carries: a data part `{"decision": …}`, or a text of one word; None when it has none."""
    for value in get_data_parts(message.parts):
        if isinstance(value, Mapping) and "decision" in value:
            return _from_data(value)
    return _from_text("\n".join(get_text_parts(message.parts)))


def _from_data(value: Mapping[str, object]) -> Decision | None:
    said, approval, words = value.get("decision"), value.get("approval"), value.get("message")
    if said not in ("approve", "deny") or not (approval is None or isinstance(approval, str)):
        return None
    if approval is not None and not _ID.fullmatch(approval):
        return None
    reason = words.strip()[:LONGEST_REASON] if isinstance(words, str) else ""
    return Decision("approve" if said == "approve" else "deny", approval, reason or None)


def _from_text(text: str) -> Decision | None:
    found = _FIRST.fullmatch(text)
    if found is None:
        return None
    word, rest = found[1].lower(), found[2].strip()
    name = _ID.match(rest)
    approval = name[0] if name else None
    rest = rest[len(approval or "") :].strip(" \t\r\n,.:;!-")
    if word in _APPROVE:
        # "approve, but …" approves nothing: the rest may take it back.
        return None if rest else Decision("approve", approval)
    if word in _DENY:
        return Decision("deny", approval, rest[:LONGEST_REASON] or None)
    return None
