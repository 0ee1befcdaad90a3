"""What a message asks for, and whether it decides something: read strictly."""

from __future__ import annotations

import pytest
from a2a.helpers import new_data_part, new_raw_part, new_text_part
from a2a.types.a2a_pb2 import Message, Part
from hypothesis import given
from hypothesis import strategies as st

from carrel.errors import InvalidRequest
from carrel.integrations.a2a.messages import LONGEST_TEXT, Decision, decision_of, text_of


def message(*parts: str | Part) -> Message:
    return Message(parts=[each if isinstance(each, Part) else new_text_part(each) for each in parts])


def test_text_and_data_are_asked_for_together() -> None:
    assert text_of(message("look at this", new_data_part({"a": [1]}))) == 'look at this\n{"a": [1.0]}'


@pytest.mark.parametrize(
    "odd", [message(), message("  \n"), message(new_raw_part(b"x")), message("x" * (LONGEST_TEXT + 1))]
)
def test_what_nobody_can_do_is_refused(odd: Message) -> None:
    with pytest.raises(InvalidRequest):
        text_of(odd)


@pytest.mark.parametrize(
    ("text", "decision"),
    [
        ("approve", Decision("approve")),
        (" Approved! ", Decision("approve")),
        ("yes", Decision("approve")),
        ("approve apr-12ab", Decision("approve", "apr-12ab")),
        ("approve: apr-12ab.", Decision("approve", "apr-12ab")),
        ("deny", Decision("deny")),
        ("No.", Decision("deny")),
        ("deny apr-12ab: it costs too much", Decision("deny", "apr-12ab", "it costs too much")),
        ("no, not on my machine", Decision("deny", None, "not on my machine")),
        ("approve, but only once", None),
        ("approve apr-12ab and apr-34cd", None),
        ("approve?maybe", None),
        ("do not approve", None),
        ("yesterday", None),
        ("", None),
        ("rm -rf .", None),
    ],
)
def test_words(text: str, decision: Decision | None) -> None:
    assert decision_of(message(text)) == decision


@pytest.mark.parametrize(
    ("data", "decision"),
    [
        ({"decision": "approve"}, Decision("approve")),
        ({"decision": "deny", "approval": "apr-1", "message": " no "}, Decision("deny", "apr-1", "no")),
        ({"decision": "approve", "approval": 7}, None),
        ({"decision": "approve", "approval": "apr-1; rm"}, None),
        ({"decision": ["approve"]}, None),
        ({"decision": "look"}, None),
        (["approve"], None),
        ("approve", None),
    ],
)
def test_data(data: object, decision: Decision | None) -> None:
    assert decision_of(message(new_data_part(data))) == decision


def test_data_counts_before_words() -> None:
    assert decision_of(message("approve", new_data_part({"decision": "deny"}))) == Decision("deny")


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=200))
def test_no_text_approves_that_says_more(text: str) -> None:
    decision = decision_of(message(text))
    if decision is not None and decision.decision == "approve":
        assert {"approve", "approved", "allow", "yes"} & {text.strip().split()[0].strip(",.:;!-").lower()}
        assert len(text.split()) <= 2
    if decision is not None:
        assert decision.approval is None or decision.approval in text
