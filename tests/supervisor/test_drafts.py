from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.nesting import give
from tests.support.sandboxes import SANDBOX_UID, House, until

from carrel.primitives.leftovers import RESERVED, remove_leftover
from carrel.supervisor.drafts import FileDraft
from carrel.supervisor.paths import DirectoryEntry, Root

LEFT = RESERVED.decode()


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Root]:
    made = Root(str(tmp_path))
    yield made
    made.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[DirectoryEntry]:
    with DirectoryEntry(os.open(tmp_path, os.O_PATH | os.O_DIRECTORY), b"name", b"name", "path") as made:
        yield made


@pytest.fixture(params=["nameless", "named"])
def nameless(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "named":
        refuse_nameless_files(monkeypatch)
    return bool(request.param == "nameless")


def refuse_nameless_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behave as a file system without `O_TMPFILE` does, such as NFS."""
    original = os.open

    def opened(path: bytes, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return original(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", opened)


@pytest.mark.usefixtures("nameless")
def test_nothing_of_the_name_shows_before_it_is_published(tmp_path: Path, root: Root, place: DirectoryEntry) -> None:
    draft = FileDraft(root, place, 0o640)
    draft.write(b"half")
    assert not (tmp_path / "name").exists()
    draft.write(memoryview(b" whole"))
    entry = draft.publish(exclusive=False)
    draft.discard()
    assert (tmp_path / "name").read_bytes() == b"half whole"
    assert entry.status.st_mode & 0o7777 == 0o640
    assert os.listdir(tmp_path) == ["name"]


def test_a_discarded_draft_leaves_nothing(tmp_path: Path, root: Root, place: DirectoryEntry, nameless: bool) -> None:
    draft, other = FileDraft(root, place, 0o600), FileDraft(root, place, 0o600)
    draft.write(b"x")
    assert os.listdir(tmp_path) == ([] if nameless else [LEFT])
    draft.discard()
    other.publish(exclusive=True)
    other.discard()
    assert os.listdir(tmp_path) == ["name"]


@pytest.mark.usefixtures("nameless")
def test_an_exclusive_draft_loses_to_a_newcomer(tmp_path: Path, root: Root, place: DirectoryEntry) -> None:
    draft = FileDraft(root, place, 0o600)
    (tmp_path / "name").write_text("first")
    with pytest.raises(FileExistsError):
        draft.publish(exclusive=True)
    draft.discard()
    assert (tmp_path / "name").read_text() == "first"
    assert os.listdir(tmp_path) == ["name"]


@pytest.mark.usefixtures("nameless")
@pytest.mark.parametrize("squatter", ["nothing", "file", "link", "directory"])
def test_whatever_has_the_reserved_name_a_file_is_replaced(
    tmp_path: Path, root: Root, place: DirectoryEntry, squatter: str
) -> None:
    (tmp_path / "name").write_text("old")
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (outside / "canary").write_text("outside")
    if squatter == "file":
        (tmp_path / LEFT).write_text("the agent's")
    elif squatter == "link":
        (tmp_path / LEFT).symlink_to(outside)
    elif squatter == "directory":
        (tmp_path / LEFT / "full").mkdir(parents=True)
    draft = FileDraft(root, place, 0o600)
    draft.write(b"new")
    draft.publish(exclusive=False)
    draft.discard()
    assert (tmp_path / "name").read_text() == "new"
    assert set(os.listdir(tmp_path)) <= {"name", LEFT}
    assert os.listdir(outside) == ["canary"]


@pytest.mark.usefixtures("nameless")
def test_a_place_that_no_file_can_be_moved_to_from_the_top(
    tmp_path: Path, root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another mount below the top, or Landlock of version 1."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "name").write_text("old")
    rename, link = os.rename, os.link
    top = os.fstat(root.fd).st_ino, (tmp_path / "a").stat().st_ino

    def renamed(source: bytes, to: bytes, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        if os.fstat(src_dir_fd).st_ino != os.fstat(dst_dir_fd).st_ino:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        rename(source, to, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    def linked(source: str, to: bytes, *, dst_dir_fd: int, follow_symlinks: bool) -> None:
        if os.fstat(dst_dir_fd).st_ino in top:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        link(source, to, dst_dir_fd=dst_dir_fd, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(os, "link", linked)
    with root.place(b"a/b/name") as place:
        draft = FileDraft(root, place, 0o644)
        draft.write(b"new" * 100_000)
        assert draft.publish(exclusive=False).status.st_size == 300_000
        draft.discard()
    assert (tmp_path / "a" / "b" / "name").read_bytes() == b"new" * 100_000
    assert os.listdir(tmp_path / "a" / "b") == ["name"]
    assert os.listdir(tmp_path) == ["a"]


KILLED = """
import os, signal, sys
from carrel.supervisor.files import Files

def kill(*args, **options):
    os.kill(os.getpid(), signal.SIGKILL)

files = Files()
files.configure(sys.argv[1])
if sys.argv[2] == "named":
    import errno
    original = os.open

    def opened(path, flags, *args, **options):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "")
        return original(path, flags, *args, **options)

    os.open = opened
os.rename = kill
files.write_bytes("a/file", b"new")
"""


@pytest.mark.parametrize("kind", ["nameless", "named"])
async def test_a_kill_between_the_two_steps_leaves_nothing_once_a_sandbox_starts_again(house: House, kind: str) -> None:
    workspace = house.workspace()
    (workspace / "a").mkdir()
    (workspace / "a" / "file").write_text("old")
    (workspace / "a" / LEFT).write_text("an agent's own file, because it is not at the top")
    ended = subprocess.run([sys.executable, "-c", KILLED, str(workspace), kind], check=False)
    assert ended.returncode == -9
    assert sorted(os.listdir(workspace)) == [LEFT, "a"], "the kill came between the two steps"
    if os.geteuid() == 0:
        give(workspace, SANDBOX_UID)
    async with house.box(workspace=str(workspace)):
        await until(lambda: os.listdir(workspace) == ["a"], what="the supervisor to remove the draft")
        assert (workspace / "a" / "file").read_text() == "old"
        assert sorted(os.listdir(workspace / "a")) == [LEFT, "file"]


def test_a_kill_before_the_first_step_leaves_nothing(tmp_path: Path, root: Root, place: DirectoryEntry) -> None:
    draft = FileDraft(root, place, 0o600)
    draft.write(b"half")
    assert os.listdir(tmp_path) == []
    draft.discard()


def test_what_an_agent_made_under_the_reserved_name_does_no_harm(tmp_path: Path, root: Root) -> None:
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (outside / "canary").write_text("outside")
    (tmp_path / LEFT).symlink_to(outside)
    remove_leftover(root.fd)
    assert os.listdir(tmp_path) == []
    (tmp_path / LEFT / "below").mkdir(parents=True)
    (tmp_path / LEFT / "link").symlink_to(outside)
    remove_leftover(root.fd)
    assert (tmp_path / LEFT / "below").is_dir()
    assert os.listdir(outside) == ["canary"]
