from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import pytest
from jsonschema import Draft202012Validator

from carrel.errors import InvalidRequest
from carrel.integrations.mcp import calls
from carrel.integrations.mcp.answers import ToolAnswer
from carrel.integrations.mcp.calls import Parameters, Tool, ToolCall, schema_of
from carrel.integrations.mcp.clients import ContextAccess
from carrel.integrations.mcp.server import CATALOGUE


class Given(Parameters):
    word: str
    count: int | None = None


async def _say(_call: ToolCall, given: Given) -> ToolAnswer:
    return ToolAnswer(given.word)


TOOL = Tool("say", "Say", "Says a word.", Given, _say, read_only=True)


def test_a_schema_is_simple() -> None:
    schema = schema_of(Given)
    assert schema["required"] == ["word"] and schema["additionalProperties"] is False
    assert schema["properties"]["word"] == {"type": "string"}
    assert schema["properties"]["count"] == {"type": "integer"}
    assert list(schema["properties"]) == ["word", "count", "approval"]
    env = CATALOGUE["run_command"].declared().input_schema["properties"]["env"]
    assert (env["type"], env["additionalProperties"]) == ("object", {"type": "string"})
    given = CATALOGUE["attach_environment"].declared().input_schema["properties"]["requirements"]
    assert (given["type"], given["items"]) == ("array", {"type": "string"})


@pytest.mark.parametrize("tool", CATALOGUE.values(), ids=lambda tool: tool.name)
def test_every_tool_teaches(tool: Tool[Any]) -> None:
    told = tool.declared()
    Draft202012Validator.check_schema(told.input_schema)
    assert told.description and told.title and told.annotations is not None
    for name, value in told.input_schema["properties"].items():
        assert value["description"], f"{tool.name} says nothing of {name}"
        assert value.keys() <= {
            "type", "description", "enum", "default", "minimum", "maximum", "items", "additionalProperties",
        }  # fmt: skip
    if told.output_schema is not None:
        Draft202012Validator.check_schema(told.output_schema)
        # A refusal is an answer too, and clients check it against the same schema.
        refusal = {"code": "x", "reason": "y", "rule": None, "retry": False, "approval": None, "hint": None}
        Draft202012Validator(told.output_schema).validate(refusal)
    hints = told.annotations
    assert not (hints.read_only_hint and hints.destructive_hint)


def test_hints_say_what_a_tool_does() -> None:
    read = {name for name, tool in CATALOGUE.items() if tool.read_only}
    assert read == {
        "read_output", "read_file", "list_files", "search_files", "list_snapshots", "list_environments",
    }  # fmt: skip
    assert {name for name, tool in CATALOGUE.items() if tool.destructive} == {
        "run_command", "stop_command", "python", "write_file", "edit_file", "restore_snapshot",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "field"),
    [(None, "word"), ({"word": 5}, "word"), ({"word": "x", "more": 1}, "more"), ({"word": "x", "count": "y"}, "count")],
)
def test_wrong_arguments_are_told_with_their_name(arguments: dict[str, Any] | None, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        TOOL.parse(arguments)
    assert caught.value.field == field and "word, count, approval" in (caught.value.hint or "")
    assert TOOL.parse({"word": "x", "count": None}).count is None


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(calls, "REPORT_EVERY_S", 0.001)
    return


async def test_who_wants_to_hears_how_it_goes(often: None) -> None:
    heard: list[tuple[float, str]] = []
    enough = asyncio.Event()

    async def report(progress: float, message: str) -> None:
        heard.append((progress, message))
        if len(heard) == 3:
            enough.set()

    call = ToolCall(cast("ContextAccess", None), report=report)
    async with call.reporting(lambda: "on the way"):
        await asyncio.wait_for(enough.wait(), 30)
    assert [progress for progress, _ in heard] == sorted(progress for progress, _ in heard)
    assert {message for _, message in heard} == {"on the way"}
    count = len(heard)
    async with ToolCall(cast("ContextAccess", None)).reporting(lambda: "nobody listens"):
        await asyncio.sleep(0)
    assert len(heard) == count
