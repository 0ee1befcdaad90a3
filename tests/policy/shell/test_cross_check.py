from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.policy.shell.commands import read
from carrel.policy.shell.cross_check import narrowed, objections
from carrel.policy.shell.step_budget import StepBudget
from carrel.policy.shell.syntax import TextFacts


def said(text: str) -> list[str]:
    facts = TextFacts()
    read(text, facts)
    return list(objections(text, facts.starts, facts.budget))


def test_both_readings_agree_on_ordinary_text() -> None:
    for text in (
        "a; b | c",
        'é; echo "ü $(a)"; b',
        "if a; then b; fi",
        "cat <<E\n$(a)\nE\nb",
        "time a",
        "coproc n { a; }",
    ):
        assert said(text) == []


def test_a_command_that_only_the_second_sees_is_told() -> None:
    (reason,) = objections("a; curl x", {0}, StepBudget())
    assert "curl x" in reason
    (reason,) = objections("é; curl x", {0}, StepBudget())
    assert "curl x" in reason


def test_what_its_grammar_refuses_is_told() -> None:
    assert list(objections("a (", {0}, StepBudget())) == ["the text does not follow the grammar of Bash"]


@given(st.text())
def test_parser_gets_only_characters_that_its_table_has(text: str) -> None:
    given = narrowed(text)
    assert len(given) == len(text) and all(char <= "\xff" for char in given)
    assert all(was == now for was, now in zip(text, given, strict=True) if was <= "\xff")


@pytest.mark.parametrize("place", ["echo {%s", "[ -%s ]", "cat <<E\nx $%s\nE\n", "%s=1", "a %s b"])
def test_no_character_ends_the_process(place: str) -> None:
    """The scanner of the grammar looks characters up in a table of 256, whatever their number is."""
    code = (
        "from carrel.policy.shell.finder import find\n"
        f"for plane in range(17): find({place!r} % chr(plane * 65536 + 12366))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
