"""Unified diffs are right for all texts, and cost little for hostile ones."""

from __future__ import annotations

import random
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from carrel.workspaces.line_diffs import unified

TEXT = st.lists(st.sampled_from(["a\n", "b\n", "c\n", "\n", "d\n"]), max_size=40).map("".join)


def applied(old: str, diff: str) -> str:
    """The text after the diff, which must fit exactly."""
    before, after, at = old.splitlines(keepends=True), [], 0
    lines = diff.splitlines(keepends=True)[2:]
    for number, line in enumerate(lines):
        bare = number + 1 < len(lines) and lines[number + 1].startswith("\\")
        body = line[1:-1] if bare else line[1:]
        if line.startswith("@@"):
            start, _, length = line.split()[1][1:].partition(",")
            first = int(start) - (length != "0")
            after += before[at:first]
            at = first
        elif line.startswith("+"):
            after.append(body)
        elif not line.startswith("\\"):
            assert before[at] == body
            after += [body] if line.startswith(" ") else []
            at += 1
    return "".join(after + before[at:])


@settings(max_examples=200, deadline=None)
@given(TEXT, TEXT, st.booleans())
def test_a_diff_leads_from_the_old_text_to_the_new(old: str, new: str, cut: bool) -> None:
    new = new[:-1] if cut else new
    diff = unified(old, new, "a", "b")
    assert applied(old, diff) == new
    assert (diff == "") == (old == new)


def test_small_edits_of_a_long_text_are_small() -> None:
    lines = [f"line {number}\n" for number in range(5000)]
    changed = [*lines[:100], "new\n", *lines[100:4000], *lines[4001:]]
    assert unified("".join(lines), "".join(changed), "a", "b").count("\n") == 2 + 8 + 8


def test_hostile_texts_take_little_time() -> None:
    rng = random.Random(1)
    old, new = ("".join(rng.choice("ab") + "\n" for _ in range(20_000)) for _ in range(2))
    began = time.process_time()
    unified(old, new, "a", "b")
    assert time.process_time() - began < 5
