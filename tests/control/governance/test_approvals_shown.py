"""What a person is shown of what they decide: nothing of it hides, and what is left out is named."""

from __future__ import annotations

import json
import re
import unicodedata

from hypothesis import given
from hypothesis import strategies as st
from tests.support.calls import call

from carrel.control.governance.approvals import LONGEST_SUMMARY, summary, visible


def shown(arguments: dict[str, object]) -> str:
    """The summary of a command."""
    return summary(call("shell", "run_command", arguments, "", "s", "c"), "apr-1")


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


def test_what_is_very_long_is_not_gone_through_to_its_end() -> None:
    line = shown({"command": ["\x7f" * 8_000_000]})
    assert line.startswith(r"'\x7f\x7f") and " […] and 80" in line and len(line) < 2 * LONGEST_SUMMARY
    assert shown({"command": "\n \t" * 100_000 + "rm -rf x"}) == "rm -rf x", "nothing hides behind blanks"


def test_what_comes_beside_a_command_is_named() -> None:
    line = shown({"command": "sh", "stdin": "rm -rf x", "env": {"A": "b"}, "timeout": 5})
    assert line == "sh (with env, stdin); see `carrel approvals show apr-1`"


def test_a_call_of_a_tool_is_shown_with_its_arguments() -> None:
    asked = call("mcp", "mcp_request", {"server": "s", "tool": "t", "arguments": {"a": "\n\x1b"}}, "", "s", "c")
    assert summary(asked) == "s:t " + json.dumps({"arguments": {"a": "\n\x1b"}})


@given(st.text("a\n\v\r\t \x1c\xa0\u2003"))
def test_blanks_around_the_end_of_a_line_belong_to_it(text: str) -> None:
    assert visible(text) == visible(re.sub(r"\s*\n\s*", "\n", text).strip())
    assert " ⏎ ⏎" not in visible(text) and not visible(text).startswith("⏎")


def test_a_text_of_blanks_is_shown_in_one_go() -> None:
    """No attempt for each of them to find the end of the line: that took minutes, and nobody else was served."""
    assert visible("a" + "\v" * 131_072 + "b") == "a" + r"\x0b" * 131_072 + "b"


@given(st.text(st.characters(exclude_categories=())))
def test_no_text_hides_anything(text: str) -> None:
    line = visible(text)
    assert line.isprintable()
    assert not {unicodedata.category(letter) for letter in line} & {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    rest = iter(line)
    assert all(letter in rest for letter in text if letter.isprintable() and not letter.isspace())
