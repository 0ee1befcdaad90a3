"""Two workspaces and a writer beside them on one filespace: whatever they do, whatever is killed, they come together."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

sys.path.insert(0, str(Path(__file__).parent))

from filespaces_for_tests import Filespace, Killed, Records, Workspace

from carrel.models import SyncDirection

MEMORY = "/dev/shm"
"""Thousands of syncs, each made durable: a disk would make them slow."""


@pytest.fixture
def records() -> Iterator[Records]:
    with tempfile.TemporaryDirectory(prefix="carrel-t-", dir=MEMORY) as directory:
        records = Records(Path(directory))
        yield records
        records.close()


PATHS = ["a", "b", "d", "d/x", "d/y", "d/x/z"]
paths = st.sampled_from(PATHS)
sides = st.integers(0, 1)
directions = st.sampled_from(list(SyncDirection))


def related(one: str, other: str) -> bool:
    """Whether two paths cannot both be files."""
    return one != other and (one.startswith(other + "/") or other.startswith(one + "/"))


class TwoSides(RuleBasedStateMachine):
    """The reference: every write has bytes of its own, so who wrote what is known wherever it turns up."""

    def __init__(self, records: Records) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="carrel-t-", dir=MEMORY))
        self.filespace = Filespace(self.directory, records)
        self.sides = [Workspace(self.directory / name, self.filespace) for name in "AB"]
        self.pictures: list[tuple[Path, dict[str, bytes]] | None] = [None, None]
        self.count = 0
        self.removed: list[dict[str, bytes]] = [{}, {}]
        self.stored: dict[str, list[bytes | None]] = {}

    def teardown(self) -> None:
        try:
            self.settle()
        finally:
            shutil.rmtree(self.directory)

    def fresh(self, who: str) -> bytes:
        self.count += 1
        return f"{who}{self.count}".encode()

    # what people and programs do

    @rule(side=sides, path=paths)
    def edit(self, side: int, path: str) -> None:
        box = self.sides[side]
        for other in PATHS:
            if related(path, other):
                self.drop(side, other)
        if (box.path / path).is_dir():
            shutil.rmtree(box.path / path)
        box.write(path, self.fresh("AB"[side]))

    @rule(side=sides, path=paths)
    def remove(self, side: int, path: str) -> None:
        self.drop(side, path)

    def drop(self, side: int, path: str) -> None:
        target = self.sides[side].path / path
        if target.is_file():
            self.removed[side][path] = target.read_bytes()
            target.unlink()

    @rule(path=paths)
    def write_directly(self, path: str) -> None:
        self.filespace.write(path, self.fresh("F"))
        self.note()

    @rule(path=paths)
    def delete_directly(self, path: str) -> None:
        self.filespace.delete(path)
        self.note()

    # what carrel does

    @rule(side=sides, direction=directions)
    def sync(self, side: int, direction: SyncDirection) -> None:
        self.attempt(side, direction)

    @rule(side=sides, direction=directions, calls=st.integers(0, 6), made=st.booleans())
    def sync_killed(self, side: int, direction: SyncDirection, calls: int, made: bool) -> None:
        self.filespace.budget.left, self.filespace.budget.made = calls, made
        try:
            self.attempt(side, direction)
        except Killed:
            pass
        finally:
            self.filespace.budget.left = None
        self.note(side)

    @rule(side=sides)
    def take_picture(self, side: int) -> None:
        picture = self.directory / f"picture{side}"
        shutil.rmtree(picture, ignore_errors=True)
        shutil.copytree(self.sides[side].directory, picture)
        self.pictures[side] = picture, dict(self.removed[side])

    @rule(side=sides)
    def bring_back(self, side: int) -> None:
        """The server is lost: another goes on with the last picture, and pulls first."""
        taken = self.pictures[side]
        if taken is not None:
            picture, removed = taken
            self.removed[side] = dict(removed)
            shutil.rmtree(self.sides[side].directory)
            shutil.copytree(picture, self.sides[side].directory)
            self.attempt(side, SyncDirection.PULL)

    def attempt(self, side: int, direction: SyncDirection) -> None:
        box = self.sides[side]
        before = box.files()
        try:
            done = box.sync(direction)
        except Killed:
            self.nothing_lost(side, before, None)
            raise
        self.nothing_lost(side, before, done.conflicts)
        self.note(side)
        if direction is SyncDirection.PUSH:
            assert box.files() == before

    # what must hold

    def nothing_lost(self, side: int, before: dict[str, bytes], conflicts: list[str] | None) -> None:
        """A sync takes a write that nobody else has from a workspace only for another write, and says so."""
        after = self.sides[side].files()
        kept = {data for log in self.stored.values() for data in log} | set(self.filespace.files().values())
        for path, data in before.items():
            if after.get(path) != data and data not in kept:
                assert path in after, f"{path} was deleted though its last write was never stored"
                assert conflicts is None or path in conflicts, f"{path} was replaced without a word"

    def note(self, side: int | None = None) -> None:
        """Judge what was stored since the last time."""
        for batch in self.filespace.log:
            written = {entry.path for entry in batch if not entry.deleted}
            for entry in batch:
                history = self.stored.setdefault(entry.path, [])
                if entry.deleted:
                    displaced = any(related(entry.path, other) for other in written)
                    if side is not None and not displaced:
                        assert self.removed[side].get(entry.path) == history[-1], f"{entry.path}: deleted a newer write"
                    history.append(None)
                    continue
                data = b"".join(self.filespace.contents.read(entry.hash or "", entry.size))
                assert data not in history or data == history[-1], f"{entry.path}: {data!r} came back"
                history.append(data)
        self.filespace.log.clear()

    @invariant()
    def the_filespace_is_a_tree_and_its_clock_only_goes_on(self) -> None:
        entries = self.filespace.changed(0)
        live = [entry.path for entry in entries if not entry.deleted]
        assert not [(one, other) for one in live for other in live if related(one, other)]

    def settle(self) -> None:
        """When nobody writes any more, two rounds make all the same."""
        for _ in range(2):
            for side in (0, 1):
                self.attempt(side, SyncDirection.BOTH)
        files = self.filespace.files()
        assert self.sides[0].files() == files == self.sides[1].files()
        for box in self.sides:
            quiet = box.sync()
            assert (quiet.pushed, quiet.pulled, quiet.push_deleted, quiet.pull_deleted) == (0, 0, 0, 0)
            assert quiet.conflicts == []
        assert list(self.filespace.spool.iterdir()) == []


def test_two_sides_always_come_together(records: Records) -> None:
    wanted = settings(
        max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    run_state_machine_as_test(lambda: TwoSides(records), settings=wanted)
