"""Mounts in a sandbox that runs: there and nowhere else, with no more power than at the start, and gone with it."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from carrel.isolation import late_mounts, linux
from carrel.isolation.cgroups import start_time
from carrel.isolation.late_mounts import LateMount

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount in another namespace")


@pytest.fixture
def pid() -> Iterator[int]:
    """A process with mounts of its own, on the root of the host."""
    process = subprocess.Popen(["unshare", "--mount", "sh", "-c", "echo; exec sleep 600"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process.pid
    process.kill()
    process.communicate()


def mounts(pid: int, target: Path) -> list[str]:
    """The mounts at a path, as the kernel describes them."""
    lines = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    return [line for line in lines if line.split(" ")[4] == str(target)]


def mount(pid: int, source: Path, target: Path | str, *, read_only: bool = False) -> None:
    tree = late_mounts.open_directory(str(source), read_only=read_only)
    try:
        late_mounts.mount(pid, start_time(pid), [LateMount(tree, str(target))])
    finally:
        os.close(tree)


def _namespace(task: Path) -> str:
    try:
        return os.readlink(task / "ns/mnt")
    except OSError:
        return ""  # it has ended


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    (tmp_path / "source/file").write_text("text")
    return tmp_path / "source"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


def test_directory_is_mounted_in_the_sandbox_alone_and_without_power(pid: int, source: Path, target: Path) -> None:
    here = os.readlink("/proc/self/ns/mnt"), os.getcwd(), os.stat("/").st_ino
    mount(pid, source, target)
    assert Path(f"/proc/{pid}/root{target}/file").read_text() == "text"
    [line] = mounts(pid, target)
    assert {"nosuid", "nodev", "rw"} <= set(line.split(" ")[5].split(","))
    assert os.listdir(target) == [] and mounts(os.getpid(), target) == []
    # This very process, in all of its threads, is where it was.
    assert here == (os.readlink("/proc/thread-self/ns/mnt"), os.getcwd(), os.stat("/").st_ino)
    while [each for each in Path("/proc/self/task").iterdir() if _namespace(each) not in {"", here[0]}]:
        time.sleep(0.001)  # the thread that has entered the sandbox is about to end
    mount(pid, source, target, read_only=True)  # on top
    with pytest.raises(OSError) as caught:
        Path(f"/proc/{pid}/root{target}/file").write_text("other")
    assert caught.value.errno == errno.EROFS


def test_memory_is_mounted_with_its_options(pid: int, target: Path) -> None:
    tree = late_mounts.open_memory({"size": "64k", "nr_inodes": "8", "mode": "0700", "uid": "1000"}, programs=False)
    try:
        late_mounts.mount(pid, start_time(pid), [LateMount(tree, str(target))])
    finally:
        os.close(tree)
    [line] = mounts(pid, target)
    assert {"nosuid", "nodev", "noexec"} <= set(line.split(" ")[5].split(","))
    place = Path(f"/proc/{pid}/root{target}")
    assert (place.stat().st_mode & 0o777, place.stat().st_uid) == (0o700, 1000)
    with pytest.raises(OSError, match="No space"):
        (place / "large").write_bytes(b"x" * (1 << 20))


@pytest.mark.parametrize("name", ["link", "link/", "link/below", "file", "missing", "loop"])
def test_what_leads_elsewhere_is_refused(name: str, pid: int, source: Path, target: Path) -> None:
    (target / "elsewhere/below").mkdir(parents=True)
    (target / "link").symlink_to("elsewhere")
    (target / "loop").symlink_to("loop")
    (target / "file").touch()
    before = Path(f"/proc/{pid}/mountinfo").read_text()
    with pytest.raises(OSError, match=f"nothing can be mounted at .*/{name}: "):
        mount(pid, source, f"{target}/{name}")
    assert Path(f"/proc/{pid}/mountinfo").read_text() == before


def test_source_that_is_no_directory_or_leads_over_a_link_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    for path in (tmp_path / "link", source / "file", source / "none"):
        with pytest.raises(OSError):
            late_mounts.open_directory(str(path))


def test_another_process_with_the_same_number_gets_nothing(pid: int, source: Path, target: Path) -> None:
    tree = late_mounts.open_directory(str(source))
    try:
        for started in (start_time(pid) + 1, 0):
            with pytest.raises(ProcessLookupError):
                late_mounts.mount(pid, started, [LateMount(tree, str(target))])
    finally:
        os.close(tree)
    assert mounts(pid, target) == []


def test_mounts_beneath_it_are_not_seen_on_the_host(tmp_path: Path) -> None:
    """The workspace may be on a mount that is shared, as on most hosts: a mask in the sandbox must not show there."""
    for name in ("shared", "target"):
        (tmp_path / name).mkdir()

    def scene() -> None:
        linux.unshare(linux.CLONE_NEWNS)
        linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
        linux.mount("tmpfs", str(tmp_path / "shared"), "tmpfs", 0)
        linux.mount("none", str(tmp_path / "shared"), None, 1 << 20)  # MS_SHARED
        (tmp_path / "shared/below").mkdir()
        words = ["unshare", "--mount", "--propagation", "unchanged", "sh", "-c", "echo; exec sleep 60"]
        with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                process.stdout.readline()
                mount(process.pid, tmp_path / "shared", tmp_path / "target")
                mount(process.pid, tmp_path / "target", tmp_path / "target/below")
                assert len(mounts(process.pid, tmp_path / "target/below")) == 1
                assert len(mounts(process.pid, tmp_path / "shared/below")) == 0
                assert len(mounts(os.getpid(), tmp_path / "shared/below")) == 0
            finally:
                process.kill()

    assert linux.attempt(scene, timeout_s=30) is None
