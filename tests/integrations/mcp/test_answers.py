from __future__ import annotations

import json

import pytest
from mcp import types

from carrel.errors import (
    ApprovalNeeded,
    CarrelError,
    Denied,
    FileMissing,
    InvalidRequest,
    LimitExceeded,
    SandboxLost,
)
from carrel.integrations.mcp.answers import Image, ToolAnswer, refusal, refused
from carrel.integrations.text import sendable_text

DENIED = Denied(
    "curl is denied for this agent",
    hint="use the allowed hosts through pip or git",
    operation="shell",
    rule="shell(curl:*)",
    source="settings.json",
    reason="curl is denied for this agent",
    retry=False,
    approval=None,
)
NEEDED = ApprovalNeeded(
    "a person has to decide: no rule covers it",
    operation="shell",
    rule=None,
    source=None,
    reason="no rule covers it",
    retry=True,
    approval="apr-1",
    expires_at="2030-01-01T00:00:00+00:00",
)


def text_of(result: types.CallToolResult) -> str:
    [block] = result.content
    assert isinstance(block, types.TextContent)
    return block.text


def test_a_denial_is_the_refusal_object_in_words_and_as_a_value() -> None:
    result = refused(DENIED, "run_command")
    assert result.is_error
    words, _, written = text_of(result).rpartition("\n\n")
    assert json.loads(written) == result.structured_content
    assert result.structured_content == {
        "code": "denied_by_policy",
        "detail": "curl is denied for this agent",
        "operation": "shell",
        "rule": "shell(curl:*)",
        "source": "settings.json",
        "reason": "curl is denied for this agent",
        "retry": False,
        "approval": None,
        "hint": "use the allowed hosts through pip or git",
    }
    assert "shell(curl:*)" in words and "changes nothing" in words and "Hint: use the allowed" in words


def test_what_waits_says_who_decides_and_how_to_go_on() -> None:
    words = text_of(refused(NEEDED, "run_command"))
    assert "apr-1" in words and "carrel approve apr-1" in words and "2030-01-01" in words
    assert "call run_command again with exactly the same arguments" in words
    assert '"approval": "apr-1"' in words


@pytest.mark.parametrize(
    ("error", "retry", "word"),
    [
        (SandboxLost("the sandbox died"), True, "carrel itself failed, not what you asked for"),
        (LimitExceeded("too many"), True, "Not done: too many"),
        (InvalidRequest("no", field="path", hint="do so"), False, "Not done: no [path]\nHint: do so"),
        (FileMissing("no 'x'"), False, "Not done"),
    ],
)
def test_every_error_has_one_shape(error: CarrelError, retry: bool, word: str) -> None:
    result = refused(error, "t")
    assert result.is_error and word in text_of(result)
    value = refusal(error)
    assert (value["code"], value["reason"], value["retry"]) == (error.code, error.detail, retry)
    assert {"code", "reason", "rule", "retry", "approval", "hint"} <= value.keys()


def test_text_value_images_and_a_note() -> None:
    result = ToolAnswer("text", {"a": 1}, [Image("aGk=", "image/png")], "more").result()
    assert [block.type for block in result.content] == ["text", "image", "text"]
    assert result.structured_content == {"a": 1} and not result.is_error
    alone = ToolAnswer("", images=[Image("aGk=", "image/png")]).result()
    assert [block.type for block in alone.content] == ["image"]
    assert [block.type for block in ToolAnswer("").result().content] == ["text"]


def test_names_that_are_not_utf8_can_be_sent() -> None:
    odd = b"a\xff.txt".decode("utf-8", "surrogateescape")
    result = ToolAnswer(odd, {"path": odd, odd: [odd]}).result()
    assert json.loads(result.model_dump_json())["content"][0]["text"] == "a\\udcff.txt"
    assert sendable_text("plain") == "plain" and sendable_text("né") == "né"
