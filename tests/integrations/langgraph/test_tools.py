from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import ToolMessage
from tests.support.langgraph_ground import Ground, calls, graph_of, says, scripted

from carrel.integrations.langgraph import carrel_tools
from carrel.integrations.langgraph.tools import MOST_CHARACTERS, MOST_MATCHES, describe_result, shorten
from carrel.models import CommandResult


async def said(ground: Ground, *wanted: tuple[str, dict[str, Any]]) -> list[ToolMessage]:
    """What the tools tell for these calls, made one after the other."""
    async with scripted(*(calls(each) for each in wanted), says("done")) as model, graph_of(model) as graph:
        result = await graph.ainvoke(
            {"messages": [("user", "x")]}, {"configurable": {"thread_id": ground.context}}, context=ground.workspace
        )
        assert result["messages"][-1].text == "done"
    return [message for message in result["messages"] if isinstance(message, ToolMessage)]


def test_a_model_is_told_of_each_tool_and_of_nothing_that_is_not_its_own() -> None:
    tools = {tool.name: tool for tool in carrel_tools()}
    assert set(tools) == {
        "run_command", "python", "read_file", "write_file", "edit_file", "list_files", "search_files",
    }  # fmt: skip
    for tool in tools.values():
        assert tool.description and "runtime" not in tool.tool_call_schema.model_json_schema()["properties"]  # type: ignore[union-attr]
        for field in tool.tool_call_schema.model_json_schema()["properties"].values():  # type: ignore[union-attr]
            assert field["description"]


async def test_files_are_written_edited_read_listed_and_searched(ground: Ground) -> None:
    messages = await said(
        ground,
        ("write_file", {"path": "a/b.txt", "content": "".join(f"line {n}\n" for n in range(1, 11))}),
        ("edit_file", {"path": "a/b.txt", "old": "line 7", "new": "line 7 line 7"}),
        ("edit_file", {"path": "a/b.txt", "old": "line 1", "new": "x"}),
        ("read_file", {"path": "a/b.txt", "first_line": 6, "lines": 2}),
        ("list_files", {"path": ".", "recursive": True}),
        ("search_files", {"pattern": "line (7|10)$", "names": "*.txt"}),
        ("search_files", {"pattern": "nowhere"}),
        ("search_files", {"pattern": "x", "path": "-no-such"}),
        ("read_file", {"path": "no-such"}),
    )
    texts, states = [message.text for message in messages], [message.status for message in messages]
    assert texts[0] == "wrote a/b.txt, 71 bytes"
    assert texts[1].startswith("replaced 1 in a/b.txt")
    assert "occurs 2 times" in texts[2] and messages[2].artifact["code"] == "edit_mismatch"
    assert texts[3] == "line 6\nline 7 line 7\n[lines 6 to 7 of 10]"
    assert "a/\na/b.txt (78 bytes)\n" in texts[4]
    assert texts[5] == "./a/b.txt:7:line 7 line 7\n./a/b.txt:10:line 10"
    assert texts[6] == "no match"
    assert "[exit code 2]" in texts[7]
    assert "no-such" in texts[8] and messages[8].artifact["code"] == "file_not_found"
    assert states == ["success"] * 2 + ["error"] + ["success"] * 5 + ["error"]


async def test_commands_and_python_tell_how_they_ended(ground: Ground) -> None:
    policy = (await ground.owner.policy(ground.context).get()).settings
    assert policy is not None
    allow = [*policy["permissions"]["allow"], "shell(python3:*)", "shell(exit:*)", "shell(seq:*)"]  # type: ignore[index]
    await ground.owner.policy(ground.context).put(settings={"permissions": {"allow": allow, "deny": ["shell(curl:*)"]}})
    messages = await said(
        ground,
        ("run_command", {"command": "echo out; echo err >&2; exit 3"}),
        ("run_command", {"command": "sleep 100", "timeout": 0.2}),
        ("run_command", {"command": "seq 1 20000"}),
        ("run_command", {"command": "curl example.org"}),
        ("run_command", {"command": "cat", "cwd": "no-such"}),
        ("python", {"code": "print(6 * 7)"}),
        ("python", {"code": "1/0"}),
        ("run_command", {}),
    )
    texts = [message.text for message in messages]
    assert texts[0] == "out\n[standard error]\nerr\n[exit code 3]" and messages[0].artifact["exit_code"] == 3
    assert texts[1] == "[timed out: killed with everything it started]"
    assert texts[2].startswith("1\n2\n") and texts[2].endswith("\n20000") and "characters left out" in texts[2]
    assert texts[3].splitlines()[1:] == ["Trying again changes nothing: choose another way."]
    refusal = messages[3].artifact
    assert (refusal["code"], refusal["rule"], refusal["retry"]) == ("denied_by_policy", "shell(curl:*)", False)
    assert messages[4].status == "error"
    assert texts[5] == "42" and "ZeroDivisionError" in texts[6]
    assert "command" in texts[7] and messages[7].status == "error", "a call without its argument is told to the model"


async def test_odd_files_do_no_harm(ground: Ground) -> None:
    box = await ground.owner.sandbox(ground.context)
    await box.files.write("odd\n\x1b[31mname", b"x")
    await box.files.write("binary", bytes(range(256)))
    await box.files.write("latin", "Käse\n".encode("latin-1"))
    await box.files.write("many", b"hit\n" * (MOST_MATCHES + 7))
    await box.files.write("more", b"hit\n" * (MOST_MATCHES + 7))
    messages = await said(
        ground,
        ("list_files", {}),
        ("read_file", {"path": "binary"}),
        ("read_file", {"path": "latin"}),
        ("search_files", {"pattern": "hit"}),
        ("read_file", {"path": "many", "first_line": 9999}),
    )
    assert "odd\\n\\x1b[31mname (1 bytes)" in messages[0].text
    assert messages[1].status == "error" and messages[2].text == "K\ufffdse"
    lines = messages[3].text.splitlines()
    assert len(lines) == MOST_MATCHES + 1 and lines[-1] == f"[{MOST_MATCHES} more; narrow the search]"
    assert messages[4].text == f"(there are {MOST_MATCHES + 7} lines)"


@given(st.text(max_size=300), st.integers(2, 100))
def test_a_long_text_keeps_its_beginning_and_its_end(text: str, most: int) -> None:
    shown = shorten(text, most)
    if len(text) <= most:
        assert shown == text
    else:
        assert shown.startswith(text[: most // 2]) and shown.endswith(text[-(most // 2) :])
        assert len(shown) <= most + 50


@pytest.mark.parametrize(
    "ending, words",
    [
        ({"exit_code": 0}, "(no output)"),
        ({"exit_code": None, "signal": "SIGTERM"}, "[killed by SIGTERM]"),
        ({"exit_code": None, "signal": "SIGKILL", "oom_killed": True}, "[killed: out of memory]"),
        ({"exit_code": 0, "dropped_bytes": 5, "truncated": True}, "[5 more bytes of output were not kept]"),
    ],
)
def test_each_ending_has_its_words(ending: dict[str, Any], words: str) -> None:
    result = CommandResult(id="c1", stdout="", stderr="", duration_ms=1, **ending)
    assert describe_result(result)["text"] == words
    assert len(describe_result(result.model_copy(update={"stdout": "x" * 99_999}))["text"]) < MOST_CHARACTERS + 200
