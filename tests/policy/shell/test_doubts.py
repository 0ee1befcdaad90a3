from __future__ import annotations

import pytest

from carrel.policy.shell.commands import read
from carrel.policy.shell.doubts import Doubts
from carrel.policy.shell.syntax import Facts


@pytest.mark.parametrize(
    ("text", "gone"),
    [("f() { a; }\nb", set()), ("a; f() { a; }\nb", set()), ("a $x; f() { a; }\nb", {"f"}), ("x=1; f() { a; }\nb", {"f"}), ("g; f() { a; }\nb", {"f"}),
     ("((1)); f() { a; }\nb", {"f"}), ("a $x\nf() { a; }\nb", set()), ("a > $x; f() { a; }\nb", {"f"}), ("cd x; f() { a; }\nb", {"f"})],
)  # fmt: skip
def test_what_an_error_on_the_line_could_skip(text: str, gone: set[str]) -> None:
    block = read(text, Facts())
    doubts = Doubts(block)
    found = [doubts.before(number, {"g"}) for number in range(len(block.nodes))]
    assert found[-1] == gone


def test_inside_a_block_nothing_is_dropped_by_itself() -> None:
    block = read("{ a $x; f() { b; }; c; }", Facts()).nodes[0]
    assert not getattr(block, "lines", ())
