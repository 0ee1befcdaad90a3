from __future__ import annotations

import pytest

from carrel.policy.shell.commands import read
from carrel.policy.shell.syntax import Bare, Block, Facts, Function, Simple, Unreadable


def test_statements_keep_their_order_and_their_scope() -> None:
    block = read("a; b && c; (d) | e & f() { g; }", Facts())
    kinds = [type(node) for node in block.nodes]
    assert kinds == [Simple, Block, Block, Function]
    both = block.nodes[1]
    assert isinstance(both, Block)
    assert isinstance(both.nodes[0], Simple)
    assert isinstance(both.nodes[1], Block)
    assert both.nodes[1].scope == "maybe"


def test_loops_and_cases() -> None:
    block = read("for x in 1 2; do a; done; case $y in b) c;; esac", Facts())
    loop, case = block.nodes
    assert isinstance(loop, Block)
    assert isinstance(loop.nodes[0], Bare)
    assert isinstance(loop.nodes[1], Block)
    assert loop.nodes[1].scope == "loop"
    assert isinstance(case, Block)


def test_assignments_are_no_words() -> None:
    (node,) = read("x=1 y=(a b) z[0]=2 cmd w=3", Facts()).nodes
    assert isinstance(node, Simple)
    assert [each.name for each in node.assignments] == ["x", "y", "z"]
    assert [word.source for word in node.words] == ["cmd", "w=3"]


def test_where_commands_begin_is_noted() -> None:
    facts = Facts()
    read("time a | b $(c) `d`", facts)
    assert facts.starts == {0, 5, 9, 13, 17}


@pytest.mark.parametrize(
    "text",
    ["[[ a ]]", "((1))", "a &> f", "a <<< b", "a <(b)", "x+=1", "x[0]=1", "x=(1)", "function f { a; }", "coproc a", "a |& b",
     "for ((;;)); do a; done", "select x in a; do b; done", "a $'b'", 'a $"b"', "case x in a) b;& c) d;; esac", "a {x}> f"],
)  # fmt: skip
def test_what_sh_reads_otherwise_is_not_read_as_sh(text: str) -> None:
    read(text, Facts(), "bash")
    with pytest.raises(Unreadable):
        read(text, Facts(), "sh")
