from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.models import SyncDirection
from carrel.workspaces.filespace import (
    UNSURE,
    Base,
    BaseRow,
    Content,
    FileStat,
    LocalFile,
    Pending,
    SyncPlan,
    plan,
    synced,
)

PUSH, PULL, BOTH = SyncDirection.PUSH, SyncDirection.PULL, SyncDirection.BOTH
hashes = st.binary(min_size=32, max_size=32).map(bytes.hex)
numbers = st.integers(0, 2**63 - 1)
contents = st.builds(Content, hashes, st.integers(0, 0o777))
names = st.text(st.characters(codec="utf-8") | st.sampled_from(["\udcff", "\n", "/"]), min_size=1)
rows = st.builds(
    BaseRow, numbers, contents, numbers, st.builds(FileStat, numbers, numbers, numbers, numbers), st.booleans()
)
bases = st.builds(
    Base,
    st.dictionaries(names, rows),
    st.dictionaries(names, st.builds(Pending, contents, numbers, numbers)),
    numbers,
    st.booleans(),
    st.floats(0, 1e10),
)


class There(NamedTuple):
    path: str
    hash: str | None
    version: int
    deleted: bool = False
    size: int = 1
    mode: int = 0o644


def here(content: str) -> LocalFile:
    return LocalFile(Content(content, 0o644), FileStat(1, 1, 1, 1), UNSURE)


def common(content: str, version: int, *, placed: bool = True) -> BaseRow:
    return BaseRow(version, Content(content, 0o644), 1, UNSURE, placed)


def decide(
    base: str | None, mine: str | None, theirs: str | bool | None, direction: SyncDirection, *, merged: bool = True
) -> SyncPlan:
    """The plan for one path; `theirs` False when the filespace did not change, None when it deleted."""
    known = Base({} if base is None else {"f": common(base, 3)}, {}, 3, merged)
    local = {} if mine is None else {"f": here(mine)}
    remote = [] if theirs is False else [There("f", str(theirs) if theirs else "x", 4, theirs is None)]
    return plan(known, local, remote, direction)


def done(made: SyncPlan) -> str:
    words = {
        "write": made.writes, "remove": made.removals, "upload": made.uploads, "tombstone": made.tombstones,
        "conflict": made.conflicts,
    }  # fmt: skip
    return " ".join(word for word, found in words.items() if found)


@pytest.mark.parametrize(
    ("base", "mine", "theirs", "push", "pull", "both"),
    [
        ("a", "a", False, "", "", ""),
        ("a", "b", False, "upload", "", "upload"),
        ("a", None, False, "tombstone", "", "tombstone"),
        (None, "b", False, "upload", "", "upload"),
        ("a", "a", "c", "", "write", "write"),
        ("a", "a", None, "", "remove", "remove"),
        (None, None, "c", "", "write", "write"),
        (None, None, None, "", "", ""),
        ("a", "c", "c", "", "", ""),
        ("a", None, None, "", "", ""),
        ("a", "b", "c", "upload conflict", "write conflict", "write conflict"),
        (None, "b", "c", "upload conflict", "write conflict", "write conflict"),
        ("a", None, "c", "conflict", "write conflict", "write conflict"),
        ("a", "b", None, "upload conflict", "conflict", "upload conflict"),
        ("a", "x", None, "", "remove", "remove"),
    ],
)
def test_what_is_done(
    base: str | None, mine: str | None, theirs: str | bool | None, push: str, pull: str, both: str
) -> None:
    """`x` is what the filespace deleted."""
    assert [done(decide(base, mine, theirs, way)) for way in (PUSH, PULL, BOTH)] == [push, pull, both]


def test_without_history_the_filespace_wins_and_nothing_is_deleted() -> None:
    ways = (PUSH, PULL, BOTH)
    assert [done(decide(None, "b", "c", way, merged=False)) for way in ways] == ["conflict", *["write conflict"] * 2]
    assert [done(decide(None, "x", None, way, merged=False)) for way in ways] == ["upload", "", "upload"]


def test_what_has_no_place_is_no_deletion() -> None:
    base = Base({"f": common("a", 3, placed=False)}, {}, 3, True)
    assert done(plan(base, {}, [], PUSH)) == "" and plan(base, {}, [], PUSH).rows == base.rows
    assert done(plan(base, {}, [], PULL)) == "write"
    assert done(plan(base, {"f": here("a")}, [], BOTH)) == ""
    assert done(plan(base, {}, [There("f", "a", 4, True)], BOTH)) == ""


def test_what_a_killed_push_left() -> None:
    mine, content = {"f": here("b")}, Content("b", 0o644)
    base = Base({"f": common("a", 3)}, {"f": Pending(content, batch=2)}, 3, True, token="t")
    assert done(plan(base, mine, [], BOTH)) == "upload"
    other = There("f", "c", 5)
    for number, expected in ((1, "upload conflict"), (2, "")):
        assert done(plan(base, mine, [other, There(base.mark, "t", 6, True, number)], PUSH)) == expected
    assert done(plan(base, mine, [other, There(base.mark, "another", 6, True, 2)], PUSH)) == "upload conflict"


def test_what_a_killed_pull_left() -> None:
    content = Content("b", 0o644)
    base = Base({"f": common("a", 3)}, {"f": Pending(content, version=5)}, 3, True)
    was, newer = There("f", "b", 5), There("f", "c", 6)
    assert [done(plan(base, {"f": here("a")}, [was], way)) for way in (PUSH, PULL)] == ["", "write"]
    assert [done(plan(base, {"f": here("b")}, [newer], way)) for way in (PUSH, PULL)] == ["", "write"]
    assert done(plan(base, {"f": here("edited")}, [was], BOTH)) == "upload"
    assert done(plan(base, {}, [was], BOTH)) == "write conflict"


def test_names_that_stay_out() -> None:
    assert not any(synced(path) for path in (".venv", "a/.venv/b", "x/node_modules", "__pycache__/y", "\0mark"))
    assert all(synced(path) for path in ("a", ".venvs/x", "node_modules.txt"))
    assert done(plan(Base(), {}, [There("a/.cache/x", "c", 1)], BOTH)) == ""


@given(bases)
def test_a_base_comes_back_as_it_was(base: Base) -> None:
    raw = base.pack()
    assert Base.unpack(raw) == base
    for damaged in (raw[:-1], raw[:40], b"", raw[:-1] + bytes([raw[-1] ^ 1])):
        assert Base.unpack(damaged).rows == {} and not Base.unpack(damaged).merged
