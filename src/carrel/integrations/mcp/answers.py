"""Answers of tools: text for the model, a value for programs, images, and errors. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mcp import types

from carrel.errors import ApprovalNeeded, CarrelError, LimitExceeded, PlatformError
from carrel.integrations.text import sendable_text
from carrel.integrations.tool_results import hint, refusal_text

_LEFT_OUT = {"type", "title", "status"}


@dataclass(frozen=True)
class Image:
    """An image in base64."""

    data: str
    media_type: str


@dataclass(frozen=True)
class ToolAnswer:
    """The answer of a tool. `note` is a separate text after it, for answers that are exactly the text of a file."""

    text: str
    value: Mapping[str, object] | None = None
    images: Sequence[Image] = field(default_factory=tuple)
    note: str | None = None

    def result(self) -> types.CallToolResult:
        """Convert it for MCP."""
        content: list[types.ContentBlock] = []
        if self.text or not self.images:
            content.append(types.TextContent(text=sendable_text(self.text)))
        content += [types.ImageContent(data=image.data, mime_type=image.media_type) for image in self.images]
        if self.note is not None:
            content.append(types.TextContent(text=sendable_text(self.note)))
        if self.value is None:
            return types.CallToolResult(content=content)
        return types.CallToolResult(content=content, structured_content=_clean(self.value))


def refused(error: CarrelError, tool: str) -> types.CallToolResult:
    """Convert an error for MCP: an explanation, then the same problem object as in every protocol."""
    value = refusal(error)
    text = f"{_words(error, tool)}\n\n{json.dumps(value, default=str)}"
    return types.CallToolResult(
        content=[types.TextContent(text=sendable_text(text))], structured_content=_clean(value), is_error=True
    )


def refusal(error: CarrelError) -> dict[str, object]:
    """Return the problem object: what happened, by which rule, why, and whether to try again."""
    value = {key: part for key, part in error.problem().items() if key not in _LEFT_OUT}
    value.setdefault("reason", error.detail)
    value.setdefault("retry", isinstance(error, PlatformError | LimitExceeded))
    value.setdefault("approval", None)
    value.setdefault("rule", None)
    value.setdefault("hint", None)
    return value


def _words(error: CarrelError, tool: str) -> str:
    if not isinstance(error, ApprovalNeeded):
        return refusal_text(error)
    until = error.extra.get("expires_at")
    return (
        f"A person has to approve this first: {error.reason}\n"
        f"Approval {error.approval} waits" + (f" until {until}" if isinstance(until, str) else "") + ".\n"
        f"What happens next: a person approves it (`carrel approve {error.approval}`) or denies it; you cannot. "
        f"Report the person, do something else meanwhile, then call {tool} again with exactly the same arguments "
        f'and "approval": "{error.approval}". It then runs once.' + hint(error)
    )


def _clean(value: object) -> object:
    if isinstance(value, str):
        return sendable_text(value)
    if isinstance(value, Mapping):
        return {sendable_text(str(key)): _clean(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(part) for part in value]
    return value if isinstance(value, int | float | bool | None) else str(value)
