"""Messages of callers and of tasks. Reads the text and the decision that a caller sends, and writes approvals, steps,
answers and failures as parts of messages. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from a2a.helpers import get_data_parts, get_text_parts, new_data_part, new_text_part
from a2a.types.a2a_pb2 import Message, Part
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage

from carrel.errors import CarrelError, InvalidRequest, PlatformError
from carrel.integrations.langgraph import PendingApproval
from carrel.integrations.text import one_line, sendable_text

LONGEST_ANSWER = 100_000
LONGEST_STEP = 500
LONGEST_DATA = 20_000
LONGEST_SHOWN = 10_000
JSON = "application/json"
LONGEST_TEXT = 200_000
LONGEST_REASON = 2000
_APPROVE = frozenset({"approve", "approved", "allow", "yes"})
_DENY = frozenset({"deny", "denied", "refuse", "reject", "no"})
_ID = re.compile(r"apr-[A-Za-z0-9-]{1,60}")
_FIRST = re.compile(r"\s*([A-Za-z]+)\b[\s,.:;!-]*(.*)", re.DOTALL)


@dataclass(frozen=True)
class Decision:
    """A person's decision. Without `approval` it is about the only operation that waits."""

    decision: Literal["approve", "deny"]
    approval: str | None = None
    message: str | None = None


def text_of(message: Message) -> str:
    """Return the text of a message for the graph. Data parts become JSON; files are refused."""
    for part in message.parts:
        if part.WhichOneof("content") not in {"text", "data"}:
            raise InvalidRequest(
                "this agent accepts only text and data parts",
                field="parts",
                hint="write files into the workspace with the carrel SDK, then name them in the text",
            )
    pieces = [*get_text_parts(message.parts)]
    pieces += [json.dumps(value, ensure_ascii=False) for value in get_data_parts(message.parts)]
    text = "\n".join(pieces)
    if not text.strip():
        raise InvalidRequest("the message has no text", field="parts", hint="write what to do in a text part")
    if len(text) > LONGEST_TEXT:
        raise InvalidRequest(f"the message is longer than {LONGEST_TEXT} characters", field="parts")
    return text


def decision_of(message: Message) -> Decision | None:
    """Read the decision of a message: a data part `{"decision": …}`, or a text of one word; None if there is none.

    It is read strictly: a text that says more than "approve" approves nothing.
    """
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
        # "approve, but …" approves nothing, because the rest may restrict it.
        return None if rest else Decision("approve", approval)
    if word in _DENY:
        return Decision("deny", approval, rest[:LONGEST_REASON] or None)
    return None


def clean(text: str, longest: int = LONGEST_ANSWER) -> str:
    """Make a text sendable, and shorten it with a remark."""
    text = sendable_text(text)
    left = len(text) - longest
    return text if left <= 0 else f"{text[:longest]}\n… {left} more characters"


def waiting(approvals: Iterable[PendingApproval], *, decides: bool, said: str | None = None) -> list[Part]:
    """Describe the operations that wait for approval: a text, and a data part for each."""
    approvals = list(approvals)
    lines = [said] if said else []
    for each in approvals:
        lines.append(f"A person has to approve: {one_line(each.summary, LONGEST_SHOWN)}")
        lines += _arguments(each)
        lines.append(f"  {one_line(each.reason, LONGEST_SHOWN)}")
        if each.problem:
            lines.append(f"  your answer could not be used: {one_line(each.problem)}")
    name = approvals[0].approval if len(approvals) == 1 else "ID"
    if decides:
        one = "" if len(approvals) == 1 else " ID"
        lines.append(f"Answer `approve{one}` or `deny{one}`, or decide with the CLI: `carrel approve {name}`.")
    else:
        lines.append(f"Decide with the CLI: `carrel approve {name}` or `carrel deny {name}`.")
        lines.append("The task then continues by itself.")
    parts = [new_text_part(clean("\n".join(lines)))]
    parts += [new_data_part(_data(each, decides), media_type=JSON) for each in approvals]
    return parts


def _arguments(each: PendingApproval) -> list[str]:
    """Describe all arguments that the summary does not contain."""
    texts = {
        name: value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
        for name, value in each.arguments.items()
    }
    shown = {name: one_line(text, LONGEST_SHOWN) for name, text in texts.items()}
    return [f"  {one_line(name)}: {text}" for name, text in shown.items() if text != each.summary]


def _data(each: PendingApproval, decides: bool) -> dict[str, object]:
    value = {"type": "approval", **each.model_dump(exclude_none=True), "decide": decides}
    if len(json.dumps(value, default=str)) > LONGEST_DATA:
        value["arguments"] = {"truncated": True}
    return _plain(value)


def failure(error: CarrelError) -> list[Part]:
    """Describe an error: a text, and the same problem object as in every protocol."""
    kind = "carrel failed, not the command" if isinstance(error, PlatformError) else error.title
    return [
        new_text_part(clean(f"{kind}: {error}")),
        new_data_part(_plain({"type": "problem", "problem": error.problem()}), media_type=JSON),
    ]


def steps(update: Mapping[str, object]) -> list[str]:
    """Describe the tool calls of an update, one line each."""
    lines: list[str] = []
    for value in update.values():
        for message in messages_in(value):
            if isinstance(message, AIMessage):
                lines += [_call(call["name"], call["args"]) for call in message.tool_calls]
    return lines


def messages_in(value: object) -> Sequence[BaseMessage]:
    """Return the messages of an update or a state."""
    found = value.get("messages") if isinstance(value, Mapping) else None
    found = found if isinstance(found, Sequence) and not isinstance(found, str) else [found]
    return [message for message in found if isinstance(message, BaseMessage)]


def _call(name: str, arguments: Mapping[str, object]) -> str:
    words = " ".join(str(value) for value in arguments.values())
    return one_line(" ".join(f"{name}: {words}".split()), LONGEST_STEP)


def answer(messages: Sequence[BaseMessage]) -> str:
    """Return the last text of the model."""
    for message in reversed(messages):
        if isinstance(message, AIMessage):
            return clean(str(message.text))
    return ""


def results(messages: Sequence[BaseMessage]) -> dict[str, object] | None:
    """Return how the last tool call of a task ended: exit code, or why it was refused; None without one."""
    for message in reversed(messages):
        if isinstance(message, ToolMessage):
            known = message.artifact if isinstance(message.artifact, Mapping) else {}
            kept = {key: known[key] for key in ("exit_code", "timed_out", "code", "rule", "reason") if key in known}
            return _plain({"tool": message.name or "", "error": message.status == "error", **kept})
        if not isinstance(message, AIMessage):
            return None
    return None


def _plain(value: Mapping[str, object]) -> dict[str, object]:
    """Convert a value to plain JSON with text that the protocol can send."""
    text = json.dumps(value, default=str, ensure_ascii=False).encode("utf-8", "replace").decode("utf-8")
    plain: dict[str, object] = json.loads(text)
    return plain
