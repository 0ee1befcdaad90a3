from __future__ import annotations

from carrel.policy.shell.effort import Effort
from carrel.policy.shell.grammar import read
from carrel.policy.shell.syntax import Facts
from carrel.policy.shell.witness import objections


def said(text: str) -> list[str]:
    facts = Facts()
    read(text, facts)
    return list(objections(text, facts.starts, facts.effort))


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
    (reason,) = objections("a; curl x", {0}, Effort())
    assert "curl x" in reason
    (reason,) = objections("é; curl x", {0}, Effort())
    assert "curl x" in reason


def test_what_its_grammar_refuses_is_told() -> None:
    assert list(objections("a (", {0}, Effort())) == ["the text does not follow the grammar of Bash"]
