from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from carrel.errors import ArchiveUnavailable
from carrel.workspaces.remote import Remote

MB = 1 << 20


@pytest.fixture
def directory(tmp_path: Path) -> Remote:
    return Remote.open(str(tmp_path / "remote"))


def test_a_directory_is_its_owners_alone(directory: Remote, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x")
    source.chmod(0o444)
    old = os.umask(0)
    try:
        directory.put("a/b/c", b"")
        directory.put_file("a/d/e", str(source))
    finally:
        os.umask(old)
    for path in [tmp_path / "remote", *(tmp_path / "remote").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_directory_shares_a_file_of_its_file_system_and_copies_others(directory: Remote, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"content")
    directory.put_file("a", str(source))
    assert source.stat().st_ino == (tmp_path / "remote" / "a").stat().st_ino
    elsewhere = os.memfd_create("elsewhere")
    os.write(elsewhere, b"other content")
    directory.put_file("b", f"/proc/self/fd/{elsewhere}")
    os.close(elsewhere)
    assert directory.get("b") == b"other content"
    directory.put_file("b", str(source))  # replaces
    assert directory.get("b") == b"content"


def test_a_directory_forgets_what_a_killed_process_left(directory: Remote, tmp_path: Path) -> None:
    directory.put("a", b"")
    aside = tmp_path / "remote" / ".aside"
    assert list(aside.iterdir()) == []
    (aside / "old").write_bytes(b"half")
    os.utime(aside / "old", (0, 0))
    (aside / "young").write_bytes(b"half")
    directory.put("a", b"")
    assert [path.name for path in aside.iterdir()] == ["young"]
    (aside / "young").unlink()
    directory.delete(["a"])
    assert list(directory.list("a")) == []


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    remote = Remote.open(str(tmp_path / "file"))
    for ask in (
        lambda: remote.put("a", b""),
        lambda: remote.get("a"),
        lambda: remote.put_file("a", "/proc/self/status"),
    ):
        with pytest.raises(ArchiveUnavailable) as caught:
            ask()
        assert caught.value.hint


def test_writers_and_removers_of_one_folder_do_not_trip_each_other(directory: Remote) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(60):
                directory.put(f"shared/deep/f{number}", b"x")
                assert directory.get(f"shared/deep/f{number}") == b"x"
                directory.delete([f"shared/deep/f{number}"])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
