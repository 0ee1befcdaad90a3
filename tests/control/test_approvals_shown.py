"""What a person is shown of what they decide: nothing of it hides, and what is left out is named."""

from __future__ import annotations

import json
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from carrel.control.approvals import LONGEST_SUMMARY, summary, visible
from carrel.control.door import Operation


def shown(arguments: dict[str, object]) -> str:
    """The summary of a command."""
    return summary(Operation("shell", "run_command", arguments, "", "s", "c"), "apr-1")


def test_the_end_of_a_line_is_seen() -> None:
    assert shown({"command": "ls # list\n  rm -rf x\r\n"}) == "ls # list ⏎ rm -rf x"
    assert shown({"command": ["sh", "-c", "a;\nb"]}) == "sh -c 'a; ⏎ b'"


def test_what_would_steer_a_terminal_or_turn_the_text_around_is_written_out() -> None:
    text = "echo \x1b[2J\u202eevil\u2066 \u200b\u00ad\x07\u2028x\udc80"
    assert shown({"command": text}) == r"echo \x1b[2J\u202eevil\u2066 \u200b\xad\x07\u2028x\udc80"


def test_what_is_cut_off_is_said_and_where_it_is() -> None:
    line = shown({"command": "x" * (LONGEST_SUMMARY + 7)})
    assert line == "x" * LONGEST_SUMMARY + " […] and 7 characters more; see `carrel approvals show apr-1`"
    assert shown({"command": "x" * LONGEST_SUMMARY}) == "x" * LONGEST_SUMMARY


def test_what_comes_beside_a_command_is_named() -> None:
    line = shown({"command": "sh", "stdin": "rm -rf x", "env": {"A": "b"}, "timeout": 5})
    assert line == "sh (with env, stdin); see `carrel approvals show apr-1`"


def test_a_call_of_a_tool_is_shown_with_its_arguments() -> None:
    call = Operation("mcp", "mcp_request", {"server": "s", "tool": "t", "arguments": {"a": "\n\x1b"}}, "", "s", "c")
    assert summary(call) == "s:t " + json.dumps({"arguments": {"a": "\n\x1b"}})


@given(st.text(st.characters(exclude_categories=())))
def test_no_text_hides_anything(text: str) -> None:
    line = visible(text)
    assert line.isprintable()
    assert not {unicodedata.category(letter) for letter in line} & {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    rest = iter(line)
    assert all(letter in rest for letter in text if letter.isprintable() and not letter.isspace())
