from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.records import SESSION

from carrel.control.mcp.catalogue import (
    MOST_CATALOGUE,
    MOST_DEPTH,
    MOST_GIVEN,
    MOST_GIVEN_DEPTH,
    MOST_PARTS,
    MOST_TOOLS,
    bounded_catalogue,
    bounded_text,
    given_size,
    is_bounded,
    is_tool_name,
)
from carrel.control.mcp.declarations import launch, policy_arguments
from carrel.control.mcp.links import (
    REFUSED,
    TIMED_OUT,
    NoAnswer,
    RequestRefused,
    known_failure,
    refusal_answer,
    timeout_answer,
)
from carrel.control.sessions.owners import discovers, whose
from carrel.errors import InvalidRequest, McpServerFailed, TooLarge
from carrel.models import McpServerRequest
from carrel.store.mcp_servers import McpServerRecord

RECORD = McpServerRecord("c", "s", {"command": ["run", "it"]}, "g", 0.0, 0.0)


def test_whose_agent_runs_in_a_sandbox() -> None:
    asking = replace(SESSION, context_id=None, acts_for="c", labels={"carrel": "mcp"})
    assert whose(SESSION) == SESSION.context_id and not discovers(SESSION)
    assert whose(asking) == "c" and discovers(asking)
    assert whose(replace(asking, labels={"carrel": "environment"})) is None, "what is built has nothing of the context"
    mine = replace(SESSION, labels={"carrel": "mcp"})
    assert whose(mine) == SESSION.context_id and not discovers(mine), "a caller's label means nothing"
    assert not discovers(replace(asking, acts_for=""))


def test_how_it_is_started() -> None:
    assert launch(RECORD, "env") == {
        "command": ["run", "it"], "cwd": None, "variables": {}, "secrets": {}, "environment": "env", "generation": "g",
    }  # fmt: skip
    assert launch(replace(RECORD, program="/workspace/bin/run"), None)["command"] == ["/workspace/bin/run", "it"]
    secret = replace(RECORD, declaration={**RECORD.declaration, "secret_variables": {"KEY": "token"}})
    assert launch(secret, None)["secrets"] == {"KEY": "token"}, "named, never given"


def test_everything_that_decides_is_decided() -> None:
    request = McpServerRequest(
        command=["a"], cwd="x", variables={"A": "1"}, secret_variables={"B": "S"}, requirements=["p"], npm=["n"]
    )
    assert policy_arguments("s", request) == {
        "server": "s",
        "command": ["a"],
        "cwd": "x",
        "env": {"A": "1", "B": "the secret S"},
        "install": [["pip", "install", "p"], ["npm", "install", "n"]],
    }


def test_what_is_told_of_a_group() -> None:
    error = McpServerFailed("x")
    assert known_failure(ExceptionGroup("", [ValueError(), ExceptionGroup("", [error])])) is error
    assert isinstance(known_failure(ExceptionGroup("", [NoAnswer()])), NoAnswer)
    assert known_failure(ExceptionGroup("", [ValueError()])) is None


def test_answers_that_stand_for_none() -> None:
    assert timeout_answer(3)[TIMED_OUT] and "3 seconds" in timeout_answer(3)["content"][0]["text"]
    assert refusal_answer(RequestRefused(-1, "no"))[REFUSED] == {"code": -1, "message": "no"}


def test_what_a_server_can_be_given() -> None:
    def nested(levels: int) -> object:
        return [nested(levels - 1)] if levels else "x"

    assert given_size({"arguments": {"text": "\u00e4"}}) == len('{"arguments": {"text": "\u00e4"}}'.encode())
    given_size({"arguments": {"text": nested(MOST_GIVEN_DEPTH - 2)}})
    wrong: list[object] = [nested(MOST_GIVEN_DEPTH - 1), nested(900), "\ud800", [0] * 200_000]
    for each in wrong:
        with pytest.raises(InvalidRequest) as caught:
            given_size({"arguments": {"text": each}})
        assert caught.value.field == "arguments" and caught.value.hint
    with pytest.raises(TooLarge):
        given_size({"arguments": {"text": "x" * MOST_GIVEN}})


def test_what_is_too_deep_or_too_much() -> None:
    deep: Any = 1
    for _ in range(MOST_DEPTH):
        deep = [deep]
    assert is_bounded(deep) and not is_bounded([deep]) and not is_bounded([0] * MOST_PARTS)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
entries = st.lists(
    st.dictionaries(
        st.sampled_from(["name", "title", "description", "inputSchema", "annotations", "uri", "uriTemplate", "else"]),
        json_values,
        max_size=6,
    ),
    max_size=8,
)


@given(st.fixed_dictionaries({}, optional={"tools": entries, "prompts": entries, "resources": entries}), json_values)
def test_any_catalogue_can_be_kept(found: dict[str, Any], info: Any) -> None:
    kept, left = bounded_catalogue(
        protocol_version="x" * 100, server_info=info if isinstance(info, dict) else None, instructions="i", found=found
    )
    text = json.dumps(kept)
    text.encode("utf-8")
    assert len(text) < MOST_CATALOGUE + 100_000 and (left is None or len(left) <= 1000)
    names = [each["name"] for each in kept["tools"]]
    assert all(map(is_tool_name, names)) and len(names) == len(set(names))
    assert set(kept) == {
        "protocol_version", "server_info", "instructions", "tools", "prompts", "resources", "resource_templates",
    }  # fmt: skip
    again, _ = bounded_catalogue(
        protocol_version=None, server_info=None, instructions=None, found={"tools": kept["tools"]}
    )
    assert again["tools"] == kept["tools"]


def test_a_catalogue_has_its_bounds() -> None:
    many = [{"name": f"t{each}", "description": "d"} for each in range(MOST_TOOLS + 5)]
    kept, left = bounded_catalogue(protocol_version=None, server_info=None, instructions=None, found={"tools": many})
    assert len(kept["tools"]) == MOST_TOOLS and left is not None and f"5 tools beyond the first {MOST_TOOLS}" in left
    large = [{"name": f"t{each}", "inputSchema": {"x": "y" * 60_000}} for each in range(30)]
    kept, left = bounded_catalogue(protocol_version=None, server_info=None, instructions=None, found={"tools": large})
    assert len(json.dumps(kept)) < MOST_CATALOGUE + 1000 and left is not None and "altogether" in left


@given(st.text())
def test_words_can_be_kept(text: str) -> None:
    kept = bounded_text(text, 50)
    assert len(kept) <= 50 and "\0" not in kept
    kept.encode("utf-8")


def test_names_that_rules_use_are_no_tools() -> None:
    assert is_tool_name("a/b.c-d_e") and not is_tool_name("resources/read") and not is_tool_name("prompts/get")
    assert not is_tool_name("a:b") and not is_tool_name("a b") and not is_tool_name("") and not is_tool_name(None)
