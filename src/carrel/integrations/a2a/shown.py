"""What callers are shown: approvals that wait, steps of the graph, refusals and failures, as parts of messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from a2a.helpers import new_data_part, new_text_part
from a2a.types.a2a_pb2 import Part
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage

from carrel.errors import CarrelError, PlatformError
from carrel.integrations.langgraph import PendingApproval
from carrel.integrations.text import one_line, sendable_text

LONGEST_ANSWER = 100_000
LONGEST_STEP = 500
LONGEST_DATA = 20_000
LONGEST_SHOWN = 10_000
JSON = "application/json"


def clean(text: str, longest: int = LONGEST_ANSWER) -> str:
    """A text that the protocol can carry; what is cut off is said."""
    text = sendable_text(text)
    left = len(text) - longest
    return text if left <= 0 else f"{text[:longest]}\n… {left} more characters"


def waiting(approvals: Iterable[PendingApproval], *, decides: bool, said: str | None = None) -> list[Part]:
    """What waits for a person: words, and for each operation its data."""
    approvals = list(approvals)
    lines = [said] if said else []
    for each in approvals:
        lines.append(f"A person has to decide: {one_line(each.summary, LONGEST_SHOWN)}")
        lines += _arguments(each)
        lines.append(f"  {one_line(each.reason, LONGEST_SHOWN)}")
        if each.problem:
            lines.append(f"  the answer could not be given to the inbox: {one_line(each.problem)}")
    name = approvals[0].approval if len(approvals) == 1 else "ID"
    if decides:
        one = "" if len(approvals) == 1 else " ID"
        lines.append(f"Answer `approve{one}` or `deny{one}`, or decide in carrel's inbox: `carrel approve {name}`.")
    else:
        lines.append(f"Decide in carrel's inbox: `carrel approve {name}` or `carrel deny {name}`.")
        lines.append("The task goes on by itself then.")
    parts = [new_text_part(clean("\n".join(lines)))]
    parts += [new_data_part(_data(each, decides), media_type=JSON) for each in approvals]
    return parts


def _arguments(each: PendingApproval) -> list[str]:
    """All that is asked for, where the summary does not say it already."""
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
    """A refusal or a failure: words, and the problem object that every protocol shows."""
    kind = "carrel failed, not the command" if isinstance(error, PlatformError) else error.title
    return [
        new_text_part(clean(f"{kind}: {error}")),
        new_data_part(_plain({"type": "problem", "problem": error.problem()}), media_type=JSON),
    ]


def steps(update: Mapping[str, object]) -> list[str]:
    """What the graph begins to do, a line for each tool it calls."""
    lines: list[str] = []
    for value in update.values():
        for message in messages_in(value):
            if isinstance(message, AIMessage):
                lines += [_call(call["name"], call["args"]) for call in message.tool_calls]
    return lines


def messages_in(value: object) -> Sequence[BaseMessage]:
    """The messages of an update or a state."""
    found = value.get("messages") if isinstance(value, Mapping) else None
    found = found if isinstance(found, Sequence) and not isinstance(found, str) else [found]
    return [message for message in found if isinstance(message, BaseMessage)]


def _call(name: str, arguments: Mapping[str, object]) -> str:
    words = " ".join(str(value) for value in arguments.values())
    return one_line(" ".join(f"{name}: {words}".split()), LONGEST_STEP)


def answer(messages: Sequence[BaseMessage]) -> str:
    """The last words of the model."""
    for message in reversed(messages):
        if isinstance(message, AIMessage):
            return clean(str(message.text))
    return ""


def results(messages: Sequence[BaseMessage]) -> dict[str, object] | None:
    """How the last command of a task ended, where it ran one: its exit code, and whether it was refused."""
    for message in reversed(messages):
        if isinstance(message, ToolMessage):
            known = message.artifact if isinstance(message.artifact, Mapping) else {}
            kept = {key: known[key] for key in ("exit_code", "timed_out", "code", "rule", "reason") if key in known}
            return _plain({"tool": message.name or "", "error": message.status == "error", **kept})
        if not isinstance(message, AIMessage):
            return None
    return None


def _plain(value: Mapping[str, object]) -> dict[str, object]:
    """Only what JSON has, and only text that the protocol can carry."""
    text = json.dumps(value, default=str, ensure_ascii=False).encode("utf-8", "replace").decode("utf-8")
    plain: dict[str, object] = json.loads(text)
    return plain
