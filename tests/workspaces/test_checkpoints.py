"""Checkpoints of a folder: what is recorded, compared, undone, left and removed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.trees_for_tests import mutate, picture

from carrel.errors import Conflict, LimitExceeded, NotFound, SnapshotDamaged
from carrel.workspaces.checkpoints import Checkpoint, CheckpointKind, CheckpointStore
from carrel.workspaces.undoing import ASIDE, Reason
from carrel.workspaces.volumes.base import ChangeKind

START, END = CheckpointKind.START, CheckpointKind.END


def opened(path: Path, most_bytes: int = 1 << 30) -> CheckpointStore:
    store = CheckpointStore(str(path), most_bytes=most_bytes)
    store.open()
    return store


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return opened(tmp_path / "store")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "folder"
    path.mkdir()
    return path


def take(store: CheckpointStore, folder: Path, begin: Checkpoint | None = None) -> Checkpoint:
    return store.take("c", str(folder), END if begin else START, begin=begin.id if begin else None)


def timeless(path: Path | str) -> dict[str, Any]:
    """A picture without the times, which an undo only gives back to what it changes."""
    return {name: (*value[:2], *value[3:]) for name, value in picture(str(path)).items()}


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_undo_gives_back_the_first_tree_after_random_edits(seed: int, later: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        store, folder = opened(Path(directory, "s")), Path(directory, "f")
        folder.mkdir()
        rng = random.Random(seed)
        mutate(str(folder), rng, 25)
        first = timeless(folder)
        start = take(store, folder)
        mutate(str(folder), rng, 25)
        changed = timeless(folder)
        end = take(store, folder, start) if later else None
        done, before = store.undo(start, end, None, dry_run=False)
        assert done.left == []
        assert without_groups(timeless(folder)) == without_groups(first)
        assert before is not None
        again, _ = store.undo(before, store.end_of(before), None, dry_run=False)  # the undo itself can be undone
        assert again.left == []
        assert without_groups(timeless(folder)) == without_groups(changed)


def without_groups(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value[:-1] if value[0] == "file" else value for name, value in found.items()}


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32))
def test_undo_never_changes_what_somebody_did_after_the_run(seed: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        store, folder = opened(Path(directory, "s")), Path(directory, "f")
        folder.mkdir()
        rng = random.Random(seed)
        mutate(str(folder), rng, 20)
        start = take(store, folder)
        mutate(str(folder), rng, 15)
        end = take(store, folder, start)
        ended = without_groups(timeless(folder))
        mutate(str(folder), rng, 8)
        now = without_groups(timeless(folder))
        store.undo(start, end, None, dry_run=False)
        kept = without_groups(timeless(folder))
        for name, value in now.items():
            if name.endswith("/") or value == ended.get(name):
                continue
            assert kept.get(name) == value, name


def test_every_kind_of_change_is_listed_and_undone(store: CheckpointStore, folder: Path) -> None:
    (folder / "dir/sub").mkdir(parents=True)
    (folder / "text").write_text("one\ntwo\nthree\n")
    (folder / "mode").write_text("x")
    (folder / "mode").chmod(0o755)
    (folder / "link").symlink_to("text")
    (folder / "dir/sub/gone").write_bytes(b"\0\1")
    (folder / "other").write_text("linked")
    os.link(folder / "other", folder / "twin")
    os.utime(folder / "text", ns=(5, 7))
    first = timeless(folder)
    start = take(store, folder)
    (folder / "text").write_text("one\n2\nthree\n")
    (folder / "mode").chmod(0o600)
    (folder / "link").unlink()
    (folder / "link").symlink_to("/etc/passwd")
    shutil.rmtree(folder / "dir")
    (folder / "dir").write_text("a file now")
    (folder / "new/deep").mkdir(parents=True)
    (folder / "new/deep/file").write_text("x")
    (folder / "twin").unlink()
    (folder / "twin").write_text("not linked")
    end = take(store, folder, start)
    found = store.changes(start, end)
    assert [(each.path, each.kind) for each in found.items] == [
        (b"dir", ChangeKind.CHANGED),
        (b"dir/sub", ChangeKind.REMOVED),
        (b"dir/sub/gone", ChangeKind.REMOVED),
        (b"link", ChangeKind.CHANGED),
        (b"mode", ChangeKind.CHANGED),
        (b"new", ChangeKind.ADDED),
        (b"new/deep", ChangeKind.ADDED),
        (b"new/deep/file", ChangeKind.ADDED),
        (b"text", ChangeKind.CHANGED),
        (b"twin", ChangeKind.CHANGED),
    ]
    patch = store.patch(start, end, [])
    assert patch.omitted == [b"dir", b"dir/sub/gone", b"link"]
    assert "".join(patch.texts) == (
        "old mode 755\nnew mode 600\n"
        "--- /dev/null\n+++ b/new/deep/file\n@@ -0,0 +1 @@\n+x\n\\ No newline at end of file\n"
        "--- a/text\n+++ b/text\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n"
        "--- a/twin\n+++ b/twin\n@@ -1 +1 @@\n"
        "-linked\n\\ No newline at end of file\n+not linked\n\\ No newline at end of file\n"
    )
    assert len(store.patch(start, None, [b"new"]).texts) == 1
    planned, _ = store.undo(start, end, None, dry_run=True)
    assert timeless(folder) != first
    done, _ = store.undo(start, end, None, dry_run=False)
    assert [(each.action, each.path) for each in done.steps] == [(each.action, each.path) for each in planned.steps]
    assert done.left == planned.left == []
    assert timeless(folder) == first
    assert (folder / "text").stat().st_mtime_ns == 7
    assert os.stat(folder / "twin").st_ino == os.stat(folder / "other").st_ino
    assert store.undo(start, end, None, dry_run=True)[0].steps == []
    assert not (folder / ASIDE).exists()


def test_undo_of_some_paths_makes_their_directories(store: CheckpointStore, folder: Path) -> None:
    (folder / "a/b").mkdir(parents=True)
    for name in ("a/b/one", "a/b/two", "three"):
        (folder / name).write_text(name)
    start = take(store, folder)
    shutil.rmtree(folder / "a")
    (folder / "three").write_text("changed")
    end = take(store, folder, start)
    done, _ = store.undo(start, end, [b"a/b/one"], dry_run=False)
    assert done.left == []
    assert sorted(os.listdir(folder / "a/b")) == ["one"]
    assert (folder / "three").read_text() == "changed"


def test_later_changes_are_named_and_left(store: CheckpointStore, folder: Path) -> None:
    for name in ("edited", "deleted", "again"):
        (folder / name).write_text("first")
    start = take(store, folder)
    for name in ("edited", "deleted", "again"):
        (folder / name).write_text("by the agent")
    (folder / "made").mkdir()
    end = take(store, folder, start)
    (folder / "edited").write_text("by a person")
    (folder / "deleted").unlink()
    (folder / "made/mine").write_text("by a person")
    done, _ = store.undo(start, end, None, dry_run=False)
    assert {each.path: each.reason for each in done.left} == {
        b"edited": Reason.CHANGED_LATER,
        b"deleted": Reason.CHANGED_LATER,
        b"made": Reason.NOT_EMPTY,
    }
    assert (folder / "edited").read_text() == "by a person"
    assert (folder / "again").read_text() == "first"
    assert (folder / "made/mine").exists()


def test_build_folders_are_not_recorded_and_cannot_be_used_to_hide(store: CheckpointStore, folder: Path) -> None:
    for name in ("node_modules/x", "src/target/mine", ".git/refs/heads/node_modules/b", "crate/target/debug"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text("x")
    (folder / "crate/Cargo.toml").write_text("")
    start = take(store, folder)
    assert set(start.ignored) == {"node_modules", "crate/target"}
    (folder / "src/Cargo.toml").write_text("")  # now the rule would leave src/target out
    (folder / "src/target/mine/file").write_text("changed")
    (folder / "node_modules/x/file").write_text("changed")
    (folder / ".git/refs/heads/node_modules/b/file").write_text("changed")
    end = take(store, folder, start)
    paths = [each.path for each in store.changes(start, end).items]
    assert paths == [b".git/refs/heads/node_modules/b/file", b"src/Cargo.toml", b"src/target/mine/file"]


def test_pipes_sockets_and_devices_are_named_and_skipped(store: CheckpointStore, folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        made = take(store, folder)
    again = take(store, folder)
    assert set(made.left_out) == set(again.left_out) == {"pipe (pipe)", "socket (socket)"}
    assert made.files == 0


def test_links_planted_by_an_agent_are_never_followed(store: CheckpointStore, folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("precious")
    (folder / "dir").mkdir()
    (folder / "dir/file").write_text("first")
    start = take(store, folder)
    (folder / "dir/file").write_text("changed")
    end = take(store, folder, start)
    shutil.rmtree(folder / "dir")
    (folder / "dir").symlink_to(outside)
    (folder / ASIDE).symlink_to(outside)
    done, _ = store.undo(start, end, None, dry_run=False)
    assert [each.path for each in done.left] == [b"dir"]
    assert (outside / "file").read_text() == "precious" and os.listdir(outside) == ["file"]


def test_a_folder_behind_a_link_or_another_folder_is_refused(
    store: CheckpointStore, folder: Path, tmp_path: Path
) -> None:
    (folder / "file").write_text("x")
    start = take(store, folder)
    folder.rename(tmp_path / "moved")
    folder.mkdir()
    with pytest.raises(Conflict, match="another directory"):
        store.undo(start, None, None, dry_run=False)
    folder.rmdir()
    folder.symlink_to(tmp_path / "moved")
    with pytest.raises(Conflict, match="cannot be opened"):
        take(store, folder)
    with pytest.raises(NotFound):
        store.get("c", "cp-none")


def test_deep_trees_do_not_prevent_the_undo_of_the_rest(store: CheckpointStore, folder: Path) -> None:
    (folder / "file").write_text("first")
    start = take(store, folder)
    (folder / "file").write_text("changed")
    fd = os.open(folder, os.O_RDONLY)
    for _ in range(60):
        os.mkdir("d" * 200, dir_fd=fd)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    end = take(store, folder, start)
    assert store.changes(start, end).counts[ChangeKind.CHANGED] == 1
    done, _ = store.undo(start, end, None, dry_run=False)
    assert (folder / "file").read_text() == "first"
    assert Reason.TOO_DEEP in {each.reason for each in done.left}


def test_again_reads_only_changed_files(store: CheckpointStore, folder: Path) -> None:
    for number in range(200):
        (folder / str(number)).write_text(str(number))
    old = time.time_ns()
    while time.time_ns() - old < 50_000_000:
        time.sleep(0.01)
    take(store, folder)
    (folder / "7").write_text("seven")
    opened_files: list[str] = []
    sys.addaudithook(lambda event, args: opened_files.append(str(args[0])) if event == "open" and watching else None)
    watching = True
    again = take(store, folder)
    watching = False
    assert again.files == 200
    assert "7" in opened_files and "8" not in opened_files


def test_limits_and_retention(tmp_path: Path, folder: Path) -> None:
    store = opened(tmp_path / "s", most_bytes=1 << 20)
    runs = []
    for number in range(4):
        (folder / "file").write_bytes(random.Random(number).randbytes(300_000))
        start = take(store, folder)
        runs.append((start, take(store, folder, start)))
    for _ in range(3):
        store.take("c", str(folder), CheckpointKind.REQUEST)
    assert store.prune("c", 2) == 5  # two runs, and one of the requested ones
    found = [each.id for each in store.all_of("c") if each.kind is not CheckpointKind.REQUEST]
    assert found == [each.id for run in runs[2:] for each in run]
    assert store.collect_garbage().bytes > 500_000
    store.shrink(400_000)
    found = [each.id for each in store.all_of("c") if each.kind is not CheckpointKind.REQUEST]
    assert found == [each.id for each in runs[3]]
    assert store.changes(runs[3][0], None).items == []
    (folder / "big").write_bytes(bytes(2 << 20))
    with pytest.raises(LimitExceeded, match="cannot be recorded") as refused:
        take(store, folder)
    assert "CARREL_CHECKPOINTS_MAX_MB" in str(refused.value.hint)
    store.forget("c")
    assert store.all_of("c") == []


def test_a_damaged_record_is_said(store: CheckpointStore, folder: Path, tmp_path: Path) -> None:
    made = take(store, folder)
    [record] = (tmp_path / "store/records/ctx-c").iterdir()
    record.write_bytes(record.read_bytes().replace(b'"files": 0', b'"files": 1'))
    with pytest.raises(SnapshotDamaged):
        store.get("c", made.id)
    assert store.collect_garbage().damaged == (made.id,)


_KILLED = """
import sys
from carrel.workspaces.checkpoints import CheckpointStore
store = CheckpointStore(sys.argv[1], most_bytes=1 << 30)
store.open()
start = store.get("c", sys.argv[2])
print("ready", flush=True)
store.undo(start, store.end_of(start), None, dry_run=False)
"""


@pytest.mark.parametrize("delay", [0.01, 0.04, 0.1])
def test_a_killed_undo_leaves_old_or_new_files_and_can_be_repeated(
    store: CheckpointStore, folder: Path, tmp_path: Path, delay: float
) -> None:
    for number in range(600):
        (folder / str(number)).write_text(f"old {number}\n" * 20)
    first = timeless(folder)
    start = take(store, folder)
    for number in range(600):
        (folder / str(number)).write_text(f"new {number}\n" * 20)
    end = take(store, folder, start)
    arguments = [sys.executable, "-c", _KILLED, str(tmp_path / "store"), start.id]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(delay)  # some point of the work; every point must do
        process.send_signal(signal.SIGKILL)
    for number in range(600):
        assert (folder / str(number)).read_text() in {f"old {number}\n" * 20, f"new {number}\n" * 20}
    opened(tmp_path / "store").undo(start, end, None, dry_run=False)
    assert timeless(folder) == first


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_owners_and_sparse_files_come_back(store: CheckpointStore, folder: Path) -> None:
    os.chown(folder, 1234, 1234)
    for name, owner in (("theirs", 1234), ("strange", 4321)):
        (folder / name).write_text("x")
        os.chown(folder / name, owner, owner)
    with open(folder / "sparse", "wb") as file:
        file.truncate(200 << 20)
        file.seek(100 << 20)
        file.write(b"middle")
    start = take(store, folder)
    for name in ("theirs", "strange", "sparse"):
        (folder / name).unlink()
    done, _ = store.undo(start, take(store, folder, start), None, dry_run=False)
    assert done.left == []
    assert [os.stat(folder / name).st_uid for name in ("theirs", "strange", "sparse")] == [1234, 4321, 0]
    found = os.stat(folder / "sparse")
    assert found.st_size == 200 << 20 and found.st_blocks * 512 < 1 << 20
    assert stat.S_IMODE(found.st_mode) == 0o644
