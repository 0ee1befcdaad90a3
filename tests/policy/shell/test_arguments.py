from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.real_shell import RealShell

from carrel.policy.shell.arguments import Argument, Unknown, _pattern, arguments, literal, shown, value
from carrel.policy.shell.commands import read
from carrel.policy.shell.step_budget import StepBudget
from carrel.policy.shell.syntax import Simple, TextFacts, Unreadable, Word


def words(text: str) -> tuple[Word, ...]:
    node = read(f"a {text}", TextFacts()).nodes[0]
    assert isinstance(node, Simple)
    return node.words[1:]


def made(text: str) -> list[Argument]:
    return [argument for word in words(text) for argument in arguments(word, StepBudget())]


def test_braces_expand_as_bash_expands_them(real_shell: RealShell) -> None:
    rng = random.Random(5)
    pieces = ["{", "}", ",", "..", "a", "b", "1", "3", "-", '"x"', "'y'", "\\,", "\\{", "{a,b}", "{1..3}", "{}", "01", "{c", "{a..c..2}", "''"]  # fmt: skip
    texts = ["".join(rng.choice(pieces) for _ in range(rng.randint(1, 8))) for _ in range(800)]
    # One shell for all: a function records its arguments as the stub of a program would.
    record_arguments = 'set -f; a() { printf \'%s\\0\' "$#" a "$@" >&9; }'
    (ran,) = real_shell.run(["\n".join([record_arguments, *(f"a {text}" for text in texts)])], seconds=60)
    assert len(ran) == len(texts)
    compared = 0
    for text, record in zip(texts, ran, strict=True):
        try:
            mine = made(text)
        except Unreadable:
            continue
        if not any(isinstance(each, Unknown) for each in mine):
            compared += 1
            assert list(record[1:]) == mine, text
    assert compared > 600


@pytest.mark.parametrize(
    ("text", "expected"),
    [('"$x"', Unknown('"$x"', "one")), ("$x", Unknown("$x", "any")), ('p"$x"s', Unknown('p"$x"s', "one", "p", "s")), ("p$x", Unknown("p$x", "any")),
     ("*.c", Unknown("*.c", "each", "", ".c")), ("a?b", Unknown("a?b", "each", "a", "b")), ("~/x", Unknown("~/x", "one")), ("[", "["), ("'*'", "*"),
     ("a[b]c", Unknown("a[b]c", "each", "a", "c")), ('"$@"', Unknown('"$@"', "any")), ("''", "")],
)  # fmt: skip
def test_what_is_known_of_an_argument(text: str, expected: Argument) -> None:
    assert made(text) == [expected]


def test_very_many_words_are_refused() -> None:
    for text in ("{1..100000}", "{a,b}" * 20, "{1..99999999999999999999}"):
        with pytest.raises(Unreadable):
            made(text)


@pytest.mark.parametrize("text", ["{" * 5000, "{a," * 2000, "{1..9}" * 900, "a{b" * 2000, "{{a,b}" * 900])
def test_very_many_braces_are_not_gone_through(text: str) -> None:
    """Every one that opens looks through all that comes after it: for minutes, if it may."""
    with pytest.raises(Unreadable, match="too many"):
        made(text)


def test_a_long_word_with_some_braces_is() -> None:
    assert made("{a,b}" + "x" * 60_000 + "{c,{") == [each + "x" * 60_000 + "{c,{" for each in "ab"]


@given(st.text("a*?[]"))
def test_where_a_pattern_begins(text: str) -> None:
    found = re.search(r"[*?]|\[.*\]", text)
    assert _pattern(text) == (None if found is None else found.start())


def test_brackets_that_nobody_closes_are_no_pattern() -> None:
    """And are not looked through from each of them to the end."""
    assert made("[" * 60_000) == ["[" * 60_000]


def test_an_unsplit_word() -> None:
    (word,) = words("{a,b}")
    assert value(word) == "{a,b}"
    (unknown,) = words("$x")
    assert isinstance(value(unknown), Unknown)
    assert literal(words("'a b'")[0].parts) == "a b"
    assert literal(unknown.parts) is None


def test_shown_as_a_person_would_write_it() -> None:
    assert [shown(each) for each in ("a", "a b", "", "$x", Unknown("$x", "any"))] == ["a", "'a b'", "''", "'$x'", "$x"]
    assert Unknown("", "one", "ab", "bc").may_be("abbc")
    assert not Unknown("", "one", "ab", "bc").may_be("abc")
