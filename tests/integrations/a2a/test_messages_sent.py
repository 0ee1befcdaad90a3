"""What callers are shown: it fits the protocol whatever the sandbox says."""

from __future__ import annotations

from typing import Any

from a2a.helpers import get_data_parts, get_text_parts
from a2a.types.a2a_pb2 import Message
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

from carrel.errors import Denied, ServerUnreachable
from carrel.integrations.a2a import messages
from carrel.integrations.langgraph import PendingApproval
from carrel.integrations.text import one_line

anything = st.text(alphabet=st.characters(), max_size=300)


def waits(**more: Any) -> PendingApproval:
    given = {
        "approval": "apr-1", "operation": "shell", "tool": "run_command", "summary": "uname -s",
        "arguments": {"command": "uname -s"}, "reason": "no rule", "context_id": "c", **more,
    }  # fmt: skip
    return PendingApproval(**given)


@given(summary=anything, reason=anything, value=anything)
def test_an_approval_is_shown_whatever_it_says(summary: str, reason: str, value: str) -> None:
    parts = messages.waiting([waits(summary=summary, reason=reason, arguments={"command": value})], decides=False)
    message = Message.FromString(Message(parts=parts).SerializeToString())
    [data] = get_data_parts(message.parts)
    assert (data["type"], data["approval"], data["decide"]) == ("approval", "apr-1", False)
    assert "carrel approve apr-1" in get_text_parts(message.parts)[0]


def test_who_decides_is_shown_all_of_it_and_nothing_that_hides_it() -> None:
    command = "echo harmless\x1b[2K\r" + " " * 300 + "\n" + "x" * 600 + "; rm -rf ~ \u202e"
    [words] = get_text_parts(
        messages.waiting([waits(summary=one_line(command), arguments={"command": command})], decides=True)
    )[:1]
    assert "; rm -rf ~" in words
    assert "[300 spaces]" in words
    assert all(line.isprintable() for line in words.split("\n"))
    assert "characters more, which are not shown" in one_line(command)
    [words] = get_text_parts(messages.waiting([waits()], decides=True))[:1]
    assert words.count("uname -s") == 1


def test_several_approvals_have_to_be_named() -> None:
    parts = messages.waiting([waits(), waits(approval="apr-2")], decides=True, said="Which?")
    assert len(parts) == 3
    assert "Which?" in parts[0].text
    assert "approve ID" in parts[0].text


def test_large_arguments_do_not_come_along() -> None:
    [_, data] = messages.waiting([waits(arguments={"content": "x" * 100_000})], decides=True)
    assert data.ByteSize() < 2000


@given(anything)
def test_a_text_is_cut_and_that_is_said(text: str) -> None:
    cut = messages.clean(text, 20)
    cut.encode()
    assert len(cut) <= 20 or "more characters" in cut


def test_a_failure_of_carrel_is_told_apart_from_a_refusal() -> None:
    platform = messages.failure(ServerUnreachable("nobody answers", hint="start it"))
    assert platform[0].text == "carrel failed, not the command: nobody answers (start it)"
    refusal = messages.failure(Denied("no", rule="shell(x)", reason="no"))
    assert refusal[0].text == "Denied by policy: no"
    assert get_data_parts(refusal)[0]["problem"]["rule"] == "shell(x)"


def test_steps_answers_and_results() -> None:
    call = {"name": "run_command", "args": {"command": "ls\n -la"}, "id": "1", "type": "tool_call"}
    asked = AIMessage(content="", tool_calls=[call])
    assert messages.steps({"model": {"messages": [asked]}, "operation": {"said": 1}}) == ["run_command: ls -la"]
    told = ToolMessage("out", artifact={"exit_code": 0, "x": 1}, name="run_command", tool_call_id="1")
    said = [HumanMessage("ls"), asked, told, AIMessage("done")]
    assert messages.answer(said) == "done"
    assert messages.results(said) == {"tool": "run_command", "error": False, "exit_code": 0}
    assert messages.answer([]) == ""
    assert messages.results([HumanMessage("hi"), AIMessage("hello")]) is None
    assert messages.messages_in(None) == []
    assert messages.messages_in({"messages": told}) == [told]
