"""The model of a synced file does what the sync would, and sees what a server must not do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.support.kill_history import NOTHING, Content, Scene, Sides, Step, SyncedHistory, met, pulled, pushed
from tests.support.kill_model import CONTESTED, Context

from carrel.models import SyncDirection
from carrel.store import FilespaceEntry
from carrel.workspaces.filespace import UNSURE, Base, BaseRow, LocalFile, plan
from carrel.workspaces.filespace import Content as Synced

CONTENTS = st.sampled_from([None, b"aa", b"bb", b"cc"])
STEPS: dict[SyncDirection, Step] = {
    SyncDirection.PUSH: pushed,
    SyncDirection.PULL: pulled,
    SyncDirection.BOTH: met,
}


def named(content: Content) -> Synced:
    return Synced((content or b"").hex(), 0o644)


def planned(sides: Sides, direction: SyncDirection) -> tuple[Content, Content]:
    """Both sides after what the sync itself plans; everything but what is common is new to it."""
    base, here, there, gone, _ = sides
    known = Base(cursor=5, merged=True)
    if base is not None:
        known.rows["f"] = BaseRow(5, named(base), 2, UNSURE, True)
    local = {} if here is None else {"f": LocalFile(named(here), UNSURE, UNSURE)}
    shown = named(gone if there is None else there)
    entry = FilespaceEntry("c", "f", shown.hash, 2, shown.mode, 0.0, there is None, 6)
    made = plan(known, local, [] if there == base else [entry], direction)
    if made.writes:
        return there, there
    if made.removals:
        return None, there
    return here, here if made.uploads or made.tombstones else there


@given(CONTENTS, CONTENTS, CONTENTS, CONTENTS, st.sampled_from(SyncDirection))
def test_a_step_comes_to_what_the_sync_plans(
    base: Content, here: Content, there: Content, gone: Content, direction: SyncDirection
) -> None:
    sides = Sides(base, here, there, None if there is not None else gone or base)
    after = {(each.here, each.there) for each in STEPS[direction](sides)}
    assert planned(sides, direction) in after
    assert len(after) == 1 or sides.gone == here  # only then does it depend on what else the sync knows


@given(CONTENTS, CONTENTS, CONTENTS)
def test_both_ways_make_both_the_same(base: Content, here: Content, there: Content) -> None:
    for after in met(Sides(base, here, there)):
        assert after.base == after.here == after.there
        assert after.here in {here, there}


def test_an_answered_write_stays_unless_the_workspace_has_a_newer_one() -> None:
    scene = Scene()
    file = SyncedHistory(scene)
    file.is_stored(b"old", 1)
    file.does(pulled, 2)
    assert file.now == {b"old"} and file.there == {b"old"}
    file.may_be_stored(b"new", 3)
    assert file.now == {b"old"} and file.there == {b"old", b"new"}
    file.is_stored(b"new", 4)
    scene.pushes = True
    file.look_again(5)
    assert file.now == {b"old"} and file.there == {b"new"}  # what did not change here is not pushed over it
    file.becomes(frozenset({b"mine"}), 6)
    assert file.there == {b"new", b"mine"}


def test_what_was_deleted_does_not_come_back() -> None:
    file = SyncedHistory(Scene(pushes=True))
    file.is_stored(b"old", 1)
    file.does(met, 2)
    file.is_stored(None, 3)
    assert file.now == {b"old"} and file.there == NOTHING
    file.does(met, 4)
    assert file.now == NOTHING and file.there == NOTHING


def test_a_push_may_store_what_it_read_a_while_ago() -> None:
    for contested in (True, False):
        file = SyncedHistory(Scene(pushes=True), contested=contested)
        file.becomes(frozenset({b"read"}), 1)
        file.becomes(frozenset({b"newer"}), 2)
        file.is_stored(b"beside", 3)
        assert (b"read" in file.there) == contested
        file.settle(4)
        file.seen(b"newer", 5)
        file.does(met, 6)
        assert file.now == file.there


def test_an_unanswered_deletion_leaves_everything_or_only_the_filespace() -> None:
    context = Context("c", filespace=True)
    context.synced(CONTESTED).is_stored(b"kept", 1)
    context.does(context.may_do(2, pulled), 2, pulled)
    context.may_be_deleted(3)
    context.settle(4)
    assert context.file(CONTESTED).now == {None, b"kept"}
    context.does(context.may_do(5, pulled), 5, pulled)
    assert context.file(CONTESTED).now == context.synced(CONTESTED).there == {b"kept"}
    assert context.reborn().file(CONTESTED).now == NOTHING


def test_a_file_that_is_written_meanwhile_may_be_synced_before_or_after() -> None:
    context = Context("c", filespace=True)
    asked = context.may_do(1, pushed)
    context.file("f").becomes(frozenset({b"x"}), 2)
    context.does(asked, 3, pushed)
    assert context.synced("f").there == {None, b"x"}
    context.does(context.may_do(4, pushed), 5, pushed)
    assert context.synced("f").there == {b"x"}
