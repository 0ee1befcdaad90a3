from __future__ import annotations

import pytest

from carrel.policy.shell.commands import after, read, skeleton
from carrel.policy.shell.syntax import Bare, Block, Function, LiteralText, Redirect, Simple, TextFacts, Unreadable


def test_statements_keep_their_order_and_their_scope() -> None:
    block = read("a; b && c; (d) | e & f() { g; }", TextFacts())
    kinds = [type(node) for node in block.nodes]
    assert kinds == [Simple, Block, Block, Function]
    both = block.nodes[1]
    assert isinstance(both, Block)
    assert isinstance(both.nodes[0], Simple)
    assert isinstance(both.nodes[1], Block)
    assert both.nodes[1].scope == "maybe"


def test_loops_and_cases() -> None:
    block = read("for x in 1 2; do a; done; case $y in b) c;; esac", TextFacts())
    loop, case = block.nodes
    assert isinstance(loop, Block)
    assert isinstance(loop.nodes[0], Bare)
    assert isinstance(loop.nodes[1], Block)
    assert loop.nodes[1].scope == "loop"
    assert isinstance(case, Block)


def test_assignments_are_no_words() -> None:
    (node,) = read("x=1 y=(a b) z[0]=2 cmd w=3", TextFacts()).nodes
    assert isinstance(node, Simple)
    assert [each.name for each in node.assignments] == ["x", "y", "z"]
    assert [word.source for word in node.words] == ["cmd", "w=3"]


def test_where_commands_begin_is_noted() -> None:
    facts = TextFacts()
    read("time a | b $(c) `d`", facts)
    assert facts.starts == {0, 5, 9, 13, 17}


@pytest.mark.parametrize(
    "text",
    ["[[ a ]]", "((1))", "a &> f", "a <<< b", "a <(b)", "x+=1", "x[0]=1", "x=(1)", "function f { a; }", "coproc a", "a |& b",
     "for ((;;)); do a; done", "select x in a; do b; done", "a $'b'", 'a $"b"', "case x in a) b;& c) d;; esac", "a {x}> f"],
)  # fmt: skip
def test_what_sh_reads_otherwise_is_not_read_as_sh(text: str) -> None:
    read(text, TextFacts(), "bash")
    with pytest.raises(Unreadable):
        read(text, TextFacts(), "sh")


def redirects(text: str) -> tuple[Redirect, ...]:
    node = read(text, TextFacts()).nodes[0]
    assert isinstance(node, Simple)
    return node.redirects


def test_operators_and_targets() -> None:
    found = redirects("a >b 2>>c <d <>e >|f &>g >&h 3<&1 {x}>i <<<j")
    assert [each.operator for each in found] == [">", ">>", "<", "<>", ">|", "&>", ">&", "<&", ">", "<<<"]
    assert [each.target.source for each in found] == ["b", "c", "d", "e", "f", "g", "h", "1", "i", "j"]


def test_closing_a_descriptor_takes_no_more_than_the_dash() -> None:
    node = read("a >&-v 2>& --", TextFacts()).nodes[0]
    assert isinstance(node, Simple)
    assert [word.source for word in node.words] == ["a", "v", "-"]


def test_here_documents_get_their_bodies() -> None:
    plain, quoted = redirects("a <<E <<-'F'\n$(b)\nE\n\t$(c)\n\tF\n")
    assert any(not isinstance(part, LiteralText) for part in plain.body)
    assert quoted.body == (LiteralText("$(c)\n", quoted=True),)


@pytest.mark.parametrize("text", ["a <<E\nb", "a <<E\nb\\\nE\n", "a <<$x\n", "a <<E $(b\n)\nE\n", "a <<E 'b\nc'\nE\n"])
def test_here_documents_that_bash_may_end_elsewhere_are_not_read(text: str) -> None:
    with pytest.raises(Unreadable):
        read(text, TextFacts())


@pytest.mark.parametrize("text", ["2\\\n> f a", "a 2\\\n>&1", "{x}\\\n> f a", "{\\\nx}> f a", "1\\\n2> f a"])
def test_a_descriptor_is_not_read_over_a_line_continuation(text: str) -> None:
    with pytest.raises(Unreadable):
        read(text, TextFacts())


def test_a_comment_ends_with_its_line() -> None:
    assert len(read("a # b; c\nd", TextFacts()).nodes) == 2
    assert len(read("a#b; c", TextFacts()).nodes) == 2


def test_the_skeleton_marks_what_is_quoted() -> None:
    (node,) = read("a x''=b$c'd'", TextFacts()).nodes
    assert isinstance(node, Simple)
    word = node.words[1]
    assert skeleton(word) == "x\0=b\0\0"
    assert skeleton(after(word, 3)) == "b\0\0"
