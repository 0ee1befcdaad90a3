"""Landlock as the kernel enforces it, in forked children that report through a pipe."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import signal
import socket
import struct
import subprocess
import sys
import termios
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.children import in_child

from carrel.errors import PlatformError
from carrel.isolation import landlock

enforced = pytest.mark.skipif(landlock.abi() == 0, reason="this kernel does not enforce Landlock")
SYSTEM = ["/usr", "/lib", "/lib64", "/bin", "/etc", "/proc", "/sys", sys.prefix, sys.base_prefix]


def error_of(work: Callable[[], object]) -> int:
    try:
        work()
    except OSError as error:
        return error.errno or -1
    return 0


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path, Path]:
    """One folder to read, one to write, one to stay out of."""
    for name in ("read", "write", "none"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    return tmp_path / "read", tmp_path / "write", tmp_path / "none"


@given(st.integers(1, 64))
def test_rights_only_grow_with_the_version(version: int) -> None:
    assert landlock.rights(version) & ~landlock.rights(version + 1) == 0
    assert landlock.rights(version) < 1 << 16


def test_rights_of_each_version() -> None:
    assert [landlock.rights(version) for version in (1, 2, 3, 4, 5, 7)] == [
        0x1FFF,
        0x3FFF,
        0x7FFF,
        0x7FFF,
        0xFFFF,
        0xFFFF,
    ]


@enforced
def test_reading_writing_and_everything_else(folders: tuple[Path, Path, Path]) -> None:
    read, write, none = folders

    def work() -> dict[str, int]:
        landlock.restrict([str(read)], [str(write)])
        (write / "folder").mkdir()
        (write / "new").write_text("new")
        os.symlink(none / "file", write / "link")
        os.rename(write / "new", write / "folder" / "moved")
        os.truncate(write / "file", 1)
        os.unlink(write / "folder" / "moved")
        return {
            "read": error_of((read / "file").read_text),
            "list": error_of(lambda: os.listdir(read)),
            "overwrite": error_of(lambda: (read / "file").write_text("x")),
            "truncate": error_of(lambda: os.truncate(read / "file", 0)),
            "create": error_of(lambda: (read / "new").write_text("x")),
            "delete": error_of((read / "file").unlink),
            "outside": error_of((none / "file").read_text),
            "outside list": error_of(lambda: os.listdir(none)),
            "through a link": error_of((write / "link").read_text),
            "hard link in": error_of(lambda: os.link(none / "file", write / "hard")),
            "dotted": error_of(lambda: os.open(f"{write}/../none/file", os.O_RDONLY)),
        }

    answers = in_child(work)
    assert isinstance(answers, dict), answers
    assert answers.pop("hard link in") in (errno.EXDEV, errno.EACCES)
    allowed = {name for name, answer in answers.items() if answer == 0}
    assert allowed == {"read", "list"}
    assert {answer for name, answer in answers.items() if name not in allowed} == {errno.EACCES}


@enforced
def test_single_files_and_descriptors(folders: tuple[Path, Path, Path]) -> None:
    read, write, none = folders
    fd = os.open(write, os.O_PATH | os.O_CLOEXEC)
    try:

        def work() -> list[int]:
            landlock.restrict([str(read / "file")], [fd, str(none / "file")])
            os.fstat(fd)
            return [
                error_of((read / "file").read_text),
                error_of(lambda: os.listdir(read)),
                error_of(lambda: (write / "new").write_text("x")),
                error_of(lambda: (none / "file").write_text("x")),
                error_of(lambda: (none / "new").write_text("x")),
            ]

        assert in_child(work) == [0, errno.EACCES, 0, 0, errno.EACCES]
    finally:
        os.close(fd)


@enforced
def test_nothing_named_means_nothing_reachable(tmp_path: Path) -> None:
    def work() -> int:
        landlock.restrict([], [])
        return error_of(lambda: os.listdir(tmp_path))

    assert in_child(work) == errno.EACCES


@enforced
@pytest.mark.parametrize("place", ["/nowhere/at/all", "with\0null", -1, 10_000])
def test_a_place_that_cannot_be_ruled_raises_and_leaves_the_process_as_it_was(place: str | int, tmp_path: Path) -> None:
    def work() -> list[object]:
        before = len(os.listdir("/proc/self/fd"))
        try:
            landlock.restrict([place], [])
        except PlatformError as error:
            caught = error.detail
        return [
            caught != "",
            error_of(lambda: os.listdir(tmp_path)),
            len(os.listdir("/proc/self/fd")) - before,
        ]

    assert in_child(work) == [True, 0, 0]


@enforced
def test_missing_paths_are_passed_over_only_when_asked(folders: tuple[Path, Path, Path]) -> None:
    read, _, none = folders

    def work() -> list[int]:
        landlock.restrict(["/nowhere/at/all", str(read)], [], missing_ok=True)
        return [error_of((read / "file").read_text), error_of((none / "file").read_text)]

    assert in_child(work) == [0, errno.EACCES]


@enforced
def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    def work() -> int:
        before = len(os.listdir("/proc/self/fd"))
        landlock.restrict(["/proc", "/usr"], [str(tmp_path)])
        return len(os.listdir("/proc/self/fd")) - before

    assert in_child(work) == 0


@enforced
@pytest.mark.skipif(landlock.abi() < 6, reason="scopes came with version 6")
@pytest.mark.parametrize("scope", [True, False])
def test_scope_hides_abstract_sockets_and_outside_processes(scope: bool) -> None:
    name = f"\0carrel-test-{uuid.uuid4()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()

        def work() -> list[int]:
            landlock.restrict(["/"], ["/"], scope=scope)
            with socket.socket(socket.AF_UNIX) as client:
                connected = error_of(lambda: client.connect(name))
            return [
                connected,
                error_of(lambda: os.kill(os.getppid(), 0)),
                error_of(lambda: os.kill(os.getpid(), 0)),
            ]

        assert in_child(work) == ([errno.EPERM, errno.EPERM, 0] if scope else [0, 0, 0])


@enforced
def test_terminals_answer_beneath_dev() -> None:
    def work() -> list[int]:
        landlock.restrict(SYSTEM, ["/dev"], missing_ok=True)
        main, end = pty.openpty()
        fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        return list(os.get_terminal_size(main))

    assert in_child(work) == [80, 24]


@enforced
def test_programs_run_and_inherit_the_wall(folders: tuple[Path, Path, Path]) -> None:
    _, write, none = folders
    script = f"echo hello > {write}/out && cat {write}/out && ! cat {none}/file && grep NoNew /proc/self/status"
    done = subprocess.run(
        ["sh", "-c", script],
        preexec_fn=lambda: landlock.restrict(SYSTEM, [str(write), "/dev"], missing_ok=True),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["hello", "NoNewPrivs:", "1"], done.stderr
    assert done.returncode == 0


@enforced
def test_it_can_be_narrowed_but_never_widened(folders: tuple[Path, Path, Path]) -> None:
    read, write, _ = folders

    def work() -> list[int]:
        landlock.restrict([str(read), str(write)], [])
        fd = os.open(read, os.O_PATH)
        landlock.restrict([], [fd])
        return [
            error_of((read / "file").read_text),
            error_of(lambda: (read / "file").write_text("x")),
            error_of((write / "file").read_text),
        ]

    assert in_child(work) == [0, errno.EACCES, errno.EACCES]


@enforced
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_it_works_without_any_privilege(tmp_path: Path) -> None:
    def work() -> int:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        landlock.restrict(["/usr"], [])
        return error_of(lambda: os.listdir("/etc"))

    assert in_child(work) == errno.EACCES


@enforced
def test_children_may_still_be_signalled() -> None:
    def work() -> int:
        landlock.restrict(SYSTEM, ["/dev"], missing_ok=True)
        child = subprocess.Popen(["sleep", "60"])
        child.send_signal(signal.SIGTERM)
        return child.wait(timeout=30)

    assert in_child(work) == -signal.SIGTERM
