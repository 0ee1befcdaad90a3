"""The model sees what a server must not do: a check that cannot fail shows nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.kill_history import NOTHING, Broken, FileHistory
from tests.support.kill_model import Background, Context, compare

OLD, NEW = frozenset({b"old"}), frozenset({b"new"})


def test_an_answered_write_must_be_there() -> None:
    context = Context("c")
    context.file("f").may_become(OLD, 1)
    context.file("f").becomes(OLD, 2)
    context.file("f").may_become(NEW, 3)
    for found in ({}, {"f": b"other"}, {"f": b"old", "stranger": b""}):
        with pytest.raises(Broken):
            context.look(found, 4)
    context.look({"f": b"old"}, 4)
    with pytest.raises(Broken):
        context.look({"f": b"new"}, 5)  # it was looked at: the write did not happen


def test_an_unanswered_restore_leaves_two_possibilities() -> None:
    context = Context("c")
    context.file("f").becomes(OLD, 1)
    picture = context.picture(1.5, 1.6)
    context.file("f").becomes(NEW, 2)
    context.file("g").becomes(NEW, 2)
    context.may_become(picture, 3)
    assert context.file("f").now == OLD | NEW
    assert context.file("g").now == NEW | NOTHING
    context.becomes(picture, 4)
    context.look({"f": b"old"}, 5)


def test_a_snapshot_holds_what_was_there_meanwhile() -> None:
    context = Context("c")
    context.file("f").becomes(OLD, 1)
    context.file("f").may_become(NEW, 3)
    context.pictures["before"] = context.picture(1.5, 2)
    context.pictures["during"] = context.picture(2, 4)
    context.file("f").becomes(NEW, 5)
    context.pictures["after"] = context.picture(6, 7)
    for name in ("before", "during"):
        context.look_at_picture(name, {"f": b"old"})
    for name in ("during", "before"):
        with pytest.raises(Broken):
            context.look_at_picture(name, {"f": b"new"})
    context.look_at_picture("after", {"f": b"new"})


@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=1)), max_size=8), st.integers(0, 8), st.integers(0, 8))
def test_what_was_true_at_a_moment_may_be_seen_around_it(
    steps: list[tuple[bool, bytes]], moment: int, width: int
) -> None:
    history, states = FileHistory(), [NOTHING]
    for when, (answered, content) in enumerate(steps):
        (history.becomes if answered else history.may_become)(frozenset({content}), when)
        states.append(history.now)
    at = min(moment, len(steps))
    assert states[at] <= history.between(at - 0.5, at - 0.5 + width)


@pytest.mark.parametrize("more", [b"line 2\n", b"line 1\nline 1\n", b"e 1\n"])
def test_output_with_a_gap_or_a_repetition(more: bytes) -> None:
    command = Background("c", b"line 0\nline 1\nline 2\n", 0)
    command.take(b"line 0\n", 7)
    with pytest.raises(Broken, match="from byte"):
        command.take(more, 99)


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(Broken, match=r"^w: a is missing, expected b'old' \(3 bytes\); b is b'' \(0 bytes\)"):
        compare("w", {"a": OLD}, {"b": b""})
