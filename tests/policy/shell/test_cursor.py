from __future__ import annotations

import pytest

from carrel.policy.shell.cursor import MAX_DEPTH, Cursor, check
from carrel.policy.shell.step_budget import MAX_TEXT
from carrel.policy.shell.syntax import TextFacts, Unreadable


def test_line_continuations_are_no_characters() -> None:
    reader = Cursor("a\\\n\\\nb \\\n&&\\\nc", TextFacts(), "bash")
    assert reader.follows("ab")
    assert not reader.take("abc")
    assert reader.take("ab ")
    assert reader.take("&&")
    assert reader.char() == "c"


@pytest.mark.parametrize("text", ["$\\\n(", "2\\\n>", "a\\\n(", "<\\\n(", "{\\\na", "&\\\n&", "=\\\n("])
def test_a_line_continuation_that_may_join_an_operator_is_not_read(text: str) -> None:
    reader = Cursor(text, TextFacts(), "bash")
    reader.at = 1
    with pytest.raises(Unreadable):
        reader.char()


def test_places_are_those_of_the_first_text() -> None:
    assert Cursor("ab", TextFacts(), "bash", origin=[7, 9]).place(1) == 9
    assert Cursor("ab", TextFacts(), "bash").place(1) == 1


def test_depth_is_bounded() -> None:
    with pytest.raises(Unreadable):
        Cursor("", TextFacts(), "bash", depth=MAX_DEPTH + 1)


def test_other_shells_get_no_bash() -> None:
    Cursor("", TextFacts(), "bash").only_bash("x")
    with pytest.raises(Unreadable, match="sh and Bash read x differently"):
        Cursor("", TextFacts(), "sh").only_bash("x")


def test_what_a_person_would_not_see_is_refused() -> None:
    check("a\n\tb é 日本 " + "x" * 1000)
    for text in ("\0", "\r", "\x7f", "\u0085", "\u2028", "\u202e", "\ud800", "x" * (MAX_TEXT + 1)):
        with pytest.raises(Unreadable):
            check(text)


def test_a_parenthesis_behind_the_next_character() -> None:
    assert Cursor("<(", TextFacts(), "bash").parenthesis_follows()
    assert not Cursor("< (", TextFacts(), "bash").parenthesis_follows()
    with pytest.raises(Unreadable):
        Cursor("<\\\n(", TextFacts(), "bash").parenthesis_follows()
