"""Two workspaces and a writer beside them on one filespace: whatever they do, whatever is killed, they come together."""

from __future__ import annotations

import os
import random
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from tests.support.filespaces_for_tests import Budget, Filespace, Killed, MortalRemote, Recorded, Records, Workspace

from carrel.errors import LimitExceeded, PlatformError, SnapshotDamaged
from carrel.models import SyncDirection
from carrel.workspaces.filespace_contents import Contents
from carrel.workspaces.filespace_sync import FilespaceSync, load_base, save_base
from carrel.workspaces.layout import CANONICAL_UID
from carrel.workspaces.remote import Remote
from carrel.workspaces.volumes.capture import FRESH_NS

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
        self.pictures: list[tuple[Path, set[tuple[str, bytes]]] | None] = [None, None]
        self.count = 0
        self.held: list[set[tuple[str, bytes]]] = [set(), set()]
        self.stored: dict[str, list[bytes | None]] = {}
        for box in self.sides:
            box.sync(SyncDirection.PULL)  # as at every start

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
            self.held[side].add((path, target.read_bytes()))
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
        self.pictures[side] = picture, set(self.held[side])

    @rule(side=sides)
    def bring_back(self, side: int) -> None:
        """The server is lost: another goes on with the last picture, and pulls first."""
        taken = self.pictures[side]
        if taken is not None:
            picture, held = taken
            self.held[side] = set(held)
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
        self.held[side].update(after.items())
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
                        assert (entry.path, history[-1]) in self.held[side], f"{entry.path}: deleted a newer write"
                        assert not (self.sides[side].path / entry.path).is_file()
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


@pytest.fixture
def filespace(tmp_path: Path, records: Records) -> Filespace:
    return Filespace(tmp_path, records)


@pytest.fixture
def one(tmp_path: Path, filespace: Filespace) -> Workspace:
    return Workspace(tmp_path / "one", filespace)


@pytest.fixture
def two(tmp_path: Path, filespace: Filespace) -> Workspace:
    return Workspace(tmp_path / "two", filespace)


def grown_up(box: Workspace) -> None:
    """Wait until no file is so new that it could change again without showing it."""
    newest = max(path.stat().st_ctime_ns for path in box.path.rglob("*"))
    while time.time_ns() - newest <= FRESH_NS:
        pass


def test_what_goes_over_and_what_does_not(one: Workspace, two: Workspace, filespace: Filespace) -> None:
    big = os.urandom(9 << 20)
    one.write("big", big)
    one.write("deep/er/file", b"x")
    one.write("empty", b"")
    one.write("not\udcffutf8\n", b"odd")
    os.link(one.path / "deep/er/file", one.path / "linked")
    os.chmod(one.path / "empty", 0o4751)
    for name in (".venv/lib", "a/node_modules/x", "a/__pycache__/y", ".cache/z", ".context.json", "a/.context.json"):
        one.write(name, b"stays")
    os.symlink("big", one.path / "link")
    os.mkfifo(one.path / "pipe")
    one.write(".carrel-sync-0123456789abcdef", b"left by a sync that was killed")
    done = one.sync()
    assert (done.pushed, done.pushed_bytes, done.skipped, done.conflicts) == (5, len(big) + 5, 2, [])
    assert not (one.path / ".carrel-sync-0123456789abcdef").exists()
    done = two.sync()
    assert (done.pulled, done.pulled_bytes) == (5, len(big) + 5)
    assert two.files() == filespace.files()
    assert set(two.files()) == {"big", "deep/er/file", "empty", "not\udcffutf8\n", "linked"}
    info = (two.path / "empty").stat()
    assert stat.S_IMODE(info.st_mode) == 0o751
    if os.geteuid() == 0:
        owners = {path.stat().st_uid for path in (two.path / "empty", two.path / "deep", two.path / "deep/er")}
        assert owners == {CANONICAL_UID}
    os.chmod(two.path / "empty", 0o600)
    assert two.sync().pushed == 1 and one.sync().pulled == 1
    assert stat.S_IMODE((one.path / "empty").stat().st_mode) == 0o600
    assert list(filespace.spool.iterdir()) == []


def test_an_unchanged_workspace_is_not_read(one: Workspace) -> None:
    for number in range(300):
        one.write(f"d{number % 7}/f{number}", b"%d" % number)
    grown_up(one)
    assert one.sync().read == 300
    before = one.base.stat()
    again = one.sync()
    assert (again.read, again.pushed, again.pulled) == (0, 0, 0)
    after = one.base.stat()  # reading it changes the time of the last access, and nothing else
    assert (after.st_ino, after.st_mtime_ns, after.st_ctime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
        before.st_ctime_ns,
    )
    one.write("d0/f0", b"changed")
    grown_up(one)
    assert (one.sync().read, one.sync().read) == (1, 0)


def test_conflicts_in_each_direction(one: Workspace, filespace: Filespace) -> None:
    for number, direction in enumerate(SyncDirection):
        one.sync()
        one.write("f", b"mine %d" % number)
        filespace.write("f", b"theirs %d" % number)
        assert one.sync(direction).conflicts == ["f"]
        winner = b"mine" if direction is SyncDirection.PUSH else b"theirs"
        assert one.files()["f"] == filespace.files()["f"] == winner + b" %d" % number
    # a deletion never wins over a write
    one.sync()
    (one.path / "f").unlink()
    filespace.write("f", b"newer")
    assert one.sync(SyncDirection.PUSH).push_deleted == 0 and filespace.files()["f"] == b"newer"
    assert one.sync().conflicts == ["f"] and one.files()["f"] == b"newer"
    one.write("f", b"mine")
    filespace.delete("f")
    assert one.sync().conflicts == ["f"] and filespace.files()["f"] == b"mine" == one.files()["f"]
    # both the same is no conflict
    one.write("f", b"same")
    filespace.write("f", b"same")
    done = one.sync()
    assert (done.pushed, done.pulled, done.conflicts) == (0, 0, [])


def test_without_a_base_nothing_is_deleted(one: Workspace, filespace: Filespace) -> None:
    for name in ("same", "differs", "only-here", "gone"):
        one.write(name, name.encode())
    one.sync()
    filespace.delete("gone")
    filespace.write("differs", b"theirs")
    filespace.write("only-there", b"theirs")
    one.base.write_bytes(one.base.read_bytes()[:-1])
    assert one.sync(SyncDirection.PUSH).conflicts == ["differs"]  # history is lost: a push must not win
    assert filespace.files()["differs"] == b"theirs" and filespace.files()["gone"] == b"gone"
    one.base.unlink()
    assert one.sync().conflicts == ["differs"]
    expected = {"same": b"same", "differs": b"theirs", "only-here": b"only-here", "gone": b"gone"}
    assert one.files() == filespace.files() == {**expected, "only-there": b"theirs"}


def test_a_filespace_that_begins_anew_takes_what_the_workspace_has(
    one: Workspace, filespace: Filespace, records: Records
) -> None:
    one.write("f", b"kept")
    one.sync()
    records.run(records.store.forget(filespace.context))
    assert one.sync().pushed == 1 and one.files() == filespace.files() == {"f": b"kept"}


def test_tombstones_that_are_forgotten_still_delete(one: Workspace, filespace: Filespace, records: Records) -> None:
    for name in ("a", "b", "c"):
        one.write(name, b"x")
    one.sync()
    filespace.delete("a")
    filespace.delete("b")
    records.run(records.store.forget_tombstones(filespace.context, -60))
    base = load_base(str(one.base))
    base.synced_at = 0.0
    save_base(str(one.base), base.pack())
    assert one.sync().pull_deleted == 2 and set(one.files()) == {"c"} == set(filespace.files())


def test_a_workspace_over_its_cap_is_refused_whole(one: Workspace, two: Workspace, filespace: Filespace) -> None:
    one.write("f", bytes(200_000))
    with pytest.raises(LimitExceeded):
        one.sync(cap=100_000)
    assert filespace.changed(0) == []
    with (one.path / "hole").open("wb") as file:
        file.truncate(1 << 40)  # claims to be big and takes no room
    with pytest.raises(LimitExceeded):
        one.sync(cap=1 << 30)
    (one.path / "hole").unlink()
    one.sync(cap=1_000_000)
    filespace.write("g", bytes(200_000))
    filespace.write("small", b"x")
    for direction in (SyncDirection.PULL, SyncDirection.BOTH):
        with pytest.raises(LimitExceeded):
            two.sync(direction, cap=300_000)
    assert two.files() == {}
    filespace.delete("f")
    assert two.sync(cap=300_000).pulled == 2
    # what is replaced or deleted makes room
    filespace.write("g", bytes(250_000))
    assert two.sync(cap=300_000).pulled == 1


def test_what_is_in_the_way_stays(one: Workspace, filespace: Filespace, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "f").write_bytes(b"not yours")
    os.symlink(outside, one.path / "d")
    os.symlink(outside / "f", one.path / "g")
    one.write("h/.venv/python", b"not synced")
    one.sync()
    for path in ("d/f", "g", "h"):
        filespace.write(path, b"new")
    (one.path / "e/e/e").mkdir(parents=True)  # empty directories are no loss
    filespace.write("e", b"file")
    done = one.sync()
    assert done.conflicts == ["d/f", "g", "h"] and done.pulled == 1
    assert one.files()["e"] == b"file" and (outside / "f").read_bytes() == b"not yours"
    assert one.sync().push_deleted == 0 and set(filespace.files()) == {"d/f", "e", "g", "h"}
    (one.path / "d").unlink()
    (one.path / "g").unlink()
    shutil.rmtree(one.path / "h")
    assert one.sync().pulled == 3
    assert one.files() == filespace.files()


def test_a_sync_can_be_stopped(one: Workspace) -> None:
    one.write("f", b"x")
    engine = one.engine()
    engine.stop()
    with pytest.raises(PlatformError, match="interrupted"):
        engine.run(SyncDirection.BOTH, None)
    assert one.sync().pushed == 1


def test_a_damaged_content_is_named_and_nothing_of_it_is_seen(one: Workspace, filespace: Filespace) -> None:
    entry = filespace.write("f", bytes(9 << 20))
    stored = next(Path(filespace.remote.description).rglob(entry.hash or ""))
    with stored.open("r+b") as file:
        file.seek(8 << 20)
        file.write(b"?")
    with pytest.raises(SnapshotDamaged) as caught:
        one.sync()
    assert caught.value.extra["objects"] == [entry.hash] and one.files() == {}
    filespace.write("f", b"mended")
    assert one.sync().pulled == 1


@pytest.mark.parametrize("seed", range(6))
def test_killed_in_the_middle_it_goes_on(one: Workspace, two: Workspace, filespace: Filespace, seed: int) -> None:
    """A real process, really killed, with nobody to tidy up after it."""
    pace = random.Random(seed)
    for number in range(40):
        filespace.write(f"pulled/{number}", b"%d" % number)
        one.write(f"pushed/{number}", b"%d" % number)
    left = pace.randint(1, 60)

    class Dying(MortalRemote):
        def _ask(self) -> None:
            super()._ask()
            if self._budget.left is not None and self._budget.left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    remote = Dying(Remote.open(filespace.remote.description), Budget(left))
    contents = Contents(remote, "ctx-c", str(filespace.spool))
    engine = FilespaceSync(str(one.path), str(one.base), Recorded(filespace), contents)
    child = os.fork()
    if child == 0:
        try:
            engine.run(SyncDirection.BOTH, None)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    done = one.sync()
    assert done.conflicts == []
    two.sync()
    assert len(filespace.files()) == 80 and one.files() == filespace.files() == two.files()
