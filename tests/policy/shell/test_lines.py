from __future__ import annotations

import pytest

from carrel.policy.shell.commands import read
from carrel.policy.shell.lines import after, skeleton
from carrel.policy.shell.syntax import Facts, Redirect, Simple, Text, Unreadable


def redirects(text: str) -> tuple[Redirect, ...]:
    node = read(text, Facts()).nodes[0]
    assert isinstance(node, Simple)
    return node.redirects


def test_operators_and_targets() -> None:
    found = redirects("a >b 2>>c <d <>e >|f &>g >&h 3<&1 {x}>i <<<j")
    assert [each.operator for each in found] == [">", ">>", "<", "<>", ">|", "&>", ">&", "<&", ">", "<<<"]
    assert [each.target.source for each in found] == ["b", "c", "d", "e", "f", "g", "h", "1", "i", "j"]


def test_closing_a_descriptor_takes_no_more_than_the_dash() -> None:
    node = read("a >&-v 2>& --", Facts()).nodes[0]
    assert isinstance(node, Simple)
    assert [word.source for word in node.words] == ["a", "v", "-"]


def test_here_documents_get_their_bodies() -> None:
    plain, quoted = redirects("a <<E <<-'F'\n$(b)\nE\n\t$(c)\n\tF\n")
    assert any(not isinstance(part, Text) for part in plain.body)
    assert quoted.body == (Text("$(c)\n", quoted=True),)


@pytest.mark.parametrize("text", ["a <<E\nb", "a <<E\nb\\\nE\n", "a <<$x\n", "a <<E $(b\n)\nE\n", "a <<E 'b\nc'\nE\n"])
def test_here_documents_that_bash_may_end_elsewhere_are_not_read(text: str) -> None:
    with pytest.raises(Unreadable):
        read(text, Facts())


@pytest.mark.parametrize("text", ["2\\\n> f a", "a 2\\\n>&1", "{x}\\\n> f a", "{\\\nx}> f a", "1\\\n2> f a"])
def test_a_descriptor_is_not_read_over_a_line_continuation(text: str) -> None:
    with pytest.raises(Unreadable):
        read(text, Facts())


def test_a_comment_ends_with_its_line() -> None:
    assert len(read("a # b; c\nd", Facts()).nodes) == 2
    assert len(read("a#b; c", Facts()).nodes) == 2


def test_the_skeleton_marks_what_is_quoted() -> None:
    (node,) = read("a x''=b$c'd'", Facts()).nodes
    assert isinstance(node, Simple)
    word = node.words[1]
    assert skeleton(word) == "x\0=b\0\0"
    assert skeleton(after(word, 3)) == "b\0\0"
