from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from carrel.isolation import watchdog
from carrel.isolation.watchdog import Shared, WatchedSandbox, count, enforce_limits

MB = 1024 * 1024
# A first process whose children hold as many megabytes as its arguments say, without their first thread for those below
# zero; it tells their pids, then waits.
TREE = """
def headless():
    while open("/proc/self/stat").read().rpartition(")")[2].split()[0] != "Z":
        pass

import ctypes, os, signal, sys, threading, time
for size in sys.argv[1:]:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        held = bytearray(os.urandom(1024) * (abs(int(size)) * 1024))
        if int(size) < 0:
            threading.Thread(target=time.sleep, args=(7777,)).start()
            threading.Thread(target=lambda: (headless(), os.write(write, b"x"))).start()
            ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
        os.write(write, b"x")
        signal.pause()
    os.read(read, 1)
    print(pid, flush=True)
print("up", flush=True)
signal.pause()
"""


class Tree:
    """A real tree of processes."""

    def __init__(self, *held: int, headless: int = 0):
        sizes = (*held, -headless) if headless else held
        command = [sys.executable, "-c", TREE, *(str(size) for size in sizes)]
        self.first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.first.stdout is not None
        self.children = [int(self.first.stdout.readline()) for _ in sizes]
        assert self.first.stdout.readline() == "up\n"

    def alive(self) -> list[bool]:
        # Dead children stay as zombies: the first process waits for none.
        return [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z" for pid in self.children]

    def settled(self, expected: list[bool]) -> None:
        for _ in range(1000):
            if self.alive() == expected:
                return
            os.sched_yield()
            signal.sigtimedwait([], 0.005)
        assert self.alive() == expected

    def close(self) -> None:
        for pid in self.children:
            os.kill(pid, signal.SIGKILL)
        self.first.kill()
        self.first.communicate()


@pytest.fixture
def tree() -> Iterator[Tree]:
    tree = Tree(10, 60, 20)
    yield tree
    tree.close()


def test_the_largest_process_of_a_tree_over_its_limit_dies(tree: Tree) -> None:
    watched = WatchedSandbox(tree.first.pid, 70 * MB)
    enforce_limits([watched])
    assert watched.used > 90 * MB
    assert watched.kills == 1
    tree.settled([True, False, True])
    enforce_limits([watched])
    assert (watched.kills, watched.used < 70 * MB) == (1, True), "what is left is below the limit"
    assert tree.alive() == [True, False, True]
    assert tree.first.poll() is None


def test_a_tree_below_its_limit_is_left_alone(tree: Tree) -> None:
    watched = WatchedSandbox(tree.first.pid, 1000 * MB)
    enforce_limits([watched])
    assert (watched.kills, tree.alive()) == (0, [True, True, True])
    assert 90 * MB < watched.used < 200 * MB


def test_each_tree_has_its_own_limit(tree: Tree) -> None:
    other = Tree(30)
    try:
        within, over = WatchedSandbox(tree.first.pid, 1000 * MB), WatchedSandbox(other.first.pid, 5 * MB)
        enforce_limits([within, over])
        assert (within.kills, over.kills) == (0, 1)
        other.settled([False])
        assert tree.alive() == [True, True, True]
    finally:
        other.close()


def test_a_process_whose_first_thread_has_ended_is_counted() -> None:
    """What is told of such a process by its own name is nothing."""
    tree = Tree(10, headless=60)
    try:
        watched = WatchedSandbox(tree.first.pid, 40 * MB)
        enforce_limits([watched])
        assert (watched.used > 60 * MB, watched.kills) == (True, 1)
    finally:
        tree.close()


def test_the_first_process_is_never_killed() -> None:
    tree = Tree()
    try:
        watched = WatchedSandbox(tree.first.pid, 1)
        enforce_limits([watched])
        assert (watched.kills, tree.first.poll()) == (0, None)
    finally:
        tree.close()


def test_a_sandbox_that_is_gone_is_no_harm() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    watched = WatchedSandbox(gone.pid, 1)
    enforce_limits([watched])
    assert (watched.used, watched.kills) == (0, 0)


def test_odd_names_and_vanishing_processes(tmp_path: Path) -> None:
    """A `/proc` of our own: a name may hold what looks like the fields after it; a process may end in between."""
    pages = os.sysconf("SC_PAGE_SIZE")
    for pid, stat, statm in (
        ("10", "10 (first) S 1 0", "9 5 1"),
        ("11", "11 (a) R 99 (b) S 10 0", "9 9 1"),
        ("12", "", "9 9 0"),
        ("13", "13 (gone) S 10 0", ""),
        ("self", "10 (first) S 1 0", "9 5 1"),
    ):
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "stat").write_text(stat)
        (tmp_path / pid / "statm").write_text(statm)
    watched = WatchedSandbox(10, 1000 * pages)
    enforce_limits([watched], str(tmp_path))
    assert watched.used == (5 - 1 + 9 - 1) * pages


# A process that shares 24 MB with a child by a map, has 16 MB in a file in memory and 8 MB in one that is only mapped.
SHARING = """
import mmap, os, signal
area = mmap.mmap(-1, 24 << 20)
area.write(b"x" * len(area))
file = os.memfd_create("held")
os.write(file, b"x" * (16 << 20))
gone = os.memfd_create("mapped")
os.write(gone, b"x" * (8 << 20))
mapped = mmap.mmap(gone, 8 << 20)
for name in os.listdir("/proc/self/fd"):  # the map has a descriptor of its own
    if os.path.islink(f"/proc/self/fd/{name}") and "memfd:mapped" in os.readlink(f"/proc/self/fd/{name}"):
        os.close(int(name))
child = os.fork()
if child:
    print(child, flush=True)
signal.pause()
"""


@pytest.fixture
def sharing() -> Iterator[tuple[int, int]]:
    """A process and its child that share memory."""
    first = subprocess.Popen([sys.executable, "-c", SHARING], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    child = int(first.stdout.readline())
    yield first.pid, child
    os.kill(child, signal.SIGKILL)
    first.kill()
    first.communicate()


def test_count_finds_shared_memory_once_whoever_holds_it(sharing: tuple[int, int]) -> None:
    first, child = sharing
    found = count(first, watchdog.shared_memory_device(), {})
    assert sum(found.files([first, child]).values()) == 48 * MB
    assert sum(found.files([child]).values()) == 48 * MB
    assert found.files([]) == {}
    assert found.uncountable == 0


def test_count_remembers_the_size_of_a_file_that_is_only_mapped(sharing: tuple[int, int]) -> None:
    first, _child = sharing
    device = watchdog.shared_memory_device()
    sizes = count(first, device, {}).files([first])
    (inode,) = [inode for inode, size in sizes.items() if size == 8 * MB]
    assert count(first, device, {inode: 100 * MB}).files([first])[inode] == 100 * MB


def test_count_of_too_many_entries_names_the_largest_process(
    sharing: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, child = sharing
    monkeypatch.setattr(watchdog, "MOST_ENTRIES", 20)
    assert count(first, watchdog.shared_memory_device(), {}).uncountable == 0, "the first process is never killed"
    monkeypatch.setattr(watchdog, "MOST_ENTRIES", len(Path(f"/proc/{first}/maps").read_text().splitlines()) + 20)
    assert count(first, watchdog.shared_memory_device(), {}).uncountable == child


def test_counts_travel_as_text_and_a_broken_text_is_none(sharing: tuple[int, int]) -> None:
    first, child = sharing
    text = watchdog.count_all([WatchedSandbox(first, 1)])
    assert sum(watchdog.parse_counted(text)[first].files([child]).values()) == 48 * MB
    assert watchdog.parse_counted(text[:-5]) == watchdog.parse_counted(b"") == {}


def test_nobody_is_killed_for_shared_memory_that_was_counted_earlier(tree: Tree) -> None:
    largest = Shared({tree.children[0]: {1: 500 * MB}})
    watched = WatchedSandbox(tree.first.pid, 200 * MB)
    watched.take_count(largest, kills=1)
    assert enforce_limits([watched]), "a new count is wanted"
    assert (watched.kills, watched.used > 500 * MB) == (0, True)
    watched.take_count(largest, kills=0)
    enforce_limits([watched])
    assert watched.kills == 1
    tree.settled([False, True, True])
    enforce_limits([watched])
    assert (watched.kills, watched.used < 200 * MB) == (1, True), "who has ended holds nothing"


def test_memory_file_systems_and_segments_are_counted(tree: Tree, tmp_path: Path) -> None:
    listed = tmp_path / "shm"
    listed.write_text("key shmid perms size cpid rss swap\n0 1 600 9 1 4096 100\n0 2 600 9 1 8192 0\n")
    watched = WatchedSandbox(tree.first.pid, 1000 * MB)
    enforce_limits([watched])
    before = watched.used
    watched.segments = os.open(listed, os.O_RDONLY)
    enforce_limits([watched])
    assert 0 <= watched.used - before - 12_388 < MB
    watched.mounts = [os.open("/dev/shm", os.O_PATH)]
    enforce_limits([watched])
    watched.close()
    assert (watched.segments, watched.mounts) == (-1, ())


def test_sockets_are_held_by_their_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `/proc` of our own, and a kill that only tells whom."""
    for pid, parent in ((10, 1), (11, 10), (12, 10)):
        (tmp_path / str(pid) / "fd").mkdir(parents=True)
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (x) S {parent} 0")
        (tmp_path / str(pid) / "statm").write_text("9 5 1")
    (tmp_path / "10" / "net").mkdir()
    sockstat = tmp_path / "10" / "net" / "sockstat"
    for number in range(500):
        (tmp_path / "12" / "fd" / str(number)).touch()
    killed: list[int] = []
    monkeypatch.setattr(watchdog, "_kill", lambda pid: not killed.append(pid))
    watched = WatchedSandbox(10, 100 * MB, own_network=True)
    for number, victims in ((watchdog.FEWEST_SOCKETS, []), (watchdog.FEWEST_SOCKETS + 1, [12])):
        sockstat.write_text(f"sockets: used {number}\nTCP: inuse 0\n")
        enforce_limits([watched], str(tmp_path))
        assert killed == victims


def test_the_processor_time_of_ended_processes_stays_counted() -> None:
    program = """
import subprocess, sys, time
work = "import time\\nwhile time.process_time() < 0.3: pass"
subprocess.run([sys.executable, "-c", work])
print("done", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "done\n"
        watched = WatchedSandbox(first.pid, 1000 * MB)
        enforce_limits([watched])
        assert watched.cpu_ticks / os.sysconf("SC_CLK_TCK") >= 0.29
        assert watched.peak == watched.used > 0
        first.communicate()
    before = watched.cpu_ticks
    enforce_limits([watched])
    assert watched.cpu_ticks == before, "it never shrinks"
