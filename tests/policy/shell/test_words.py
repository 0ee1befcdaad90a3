from __future__ import annotations

import pytest

from carrel.policy.shell.commands import read
from carrel.policy.shell.syntax import Expansion, LiteralText, Part, Simple, TextFacts, Unreadable
from carrel.policy.shell.words import merged


def parts(text: str, facts: TextFacts | None = None) -> tuple[Part, ...]:
    node = read(f"a {text}", facts or TextFacts()).nodes[0]
    assert isinstance(node, Simple)
    return node.words[1].parts


@pytest.mark.parametrize(
    ("text", "value"),
    [("b", "b"), ("'b c'", "b c"), ('"b c"', "b c"), ("b\\ c", "b c"), ("$'b\\tc\\x41\\101\\u0042'", "b\tcAAB"), ('"\\$\\"\\\\\\a"', '$"\\\\a'),
     ("b\\\nc", "bc"), ('"b\\\nc"', "bc"), ("'b\\\nc'", "b\\\nc"), ('$"b"', "b"), ("b''", "b"), ("$", "$"), ("b#c", "b#c")],
)  # fmt: skip
def test_quotes_are_removed_as_bash_does(text: str, value: str) -> None:
    assert "".join(part.text for part in parts(text) if isinstance(part, LiteralText)) == value


@pytest.mark.parametrize(
    ("text", "many", "names"),
    [("$x", True, ("x",)), ('"$x"', False, ("x",)), ('"$@"', True, ("@",)), ('"$*"', False, ("@",)), ("$#", True, ()), ("${#x}", True, ()),
     ("$(b)", True, None), ('"`b`"', False, None), ("${x:-y}", True, ("x",)), ('"${x:-$y}"', False, ("x", "y")), ("$((x+1))", True, ()),
     ('"${r[@]}"', True, ("r",)), ("${x:-$(b)}", True, None), ("${!x}", True, None), ("$_", True, None)],
)  # fmt: skip
def test_expansions_tell_what_they_are_made_of(text: str, many: bool, names: tuple[str, ...] | None) -> None:
    found = [part for part in parts(text) if isinstance(part, Expansion)]
    assert [(part.many, part.names) for part in found] == [(many, names)]


def test_programs_inside_are_found() -> None:
    (expansion,) = (part for part in parts("${x/$(b)/`c`}") if isinstance(part, Expansion))
    assert len(expansion.programs) == 2


def test_arithmetic_notes_what_it_evaluates() -> None:
    facts = TextFacts()
    parts("$((x + y[z] * $w)) ${q[i]} ${s:n}", facts)
    read("[[ u -eq 1 ]]; ((v++)); t[k]=1", facts)
    assert facts.evaluated == set("xyzwinuvk")


@pytest.mark.parametrize(
    "text",
    [
        "${x",
        "$(",
        "'",
        '"',
        "`",
        "$[1]",
        "${x!}",
        "$'\\q'",
        "$'\\0'",
        "${x:-{a}}",
        "\"${x:-'a'}\"",
        "$((a;b))",
        "${x@P}",
        "`a # b`",
    ],
)
def test_what_is_not_surely_read_is_not_read(text: str) -> None:
    with pytest.raises(Unreadable):
        parts(text)


def test_neighbours_become_one() -> None:
    assert merged([LiteralText("a", quoted=False), LiteralText("b", quoted=False), LiteralText("c", quoted=True)]) == (
        LiteralText("ab", quoted=False), LiteralText("c", quoted=True),
    )  # fmt: skip
