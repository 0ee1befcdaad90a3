from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from carrel.isolation.watchdog import Watched, look

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
    watched = Watched(tree.first.pid, 70 * MB)
    look([watched])
    assert watched.used > 90 * MB
    assert watched.kills == 1
    tree.settled([True, False, True])
    look([watched])
    assert (watched.kills, watched.used < 70 * MB) == (1, True), "what is left is below the limit"
    assert tree.alive() == [True, False, True]
    assert tree.first.poll() is None


def test_a_tree_below_its_limit_is_left_alone(tree: Tree) -> None:
    watched = Watched(tree.first.pid, 1000 * MB)
    look([watched])
    assert (watched.kills, tree.alive()) == (0, [True, True, True])
    assert 90 * MB < watched.used < 200 * MB


def test_each_tree_has_its_own_limit(tree: Tree) -> None:
    other = Tree(30)
    try:
        within, over = Watched(tree.first.pid, 1000 * MB), Watched(other.first.pid, 5 * MB)
        look([within, over])
        assert (within.kills, over.kills) == (0, 1)
        other.settled([False])
        assert tree.alive() == [True, True, True]
    finally:
        other.close()


def test_a_process_whose_first_thread_has_ended_is_counted() -> None:
    """What is told of such a process by its own name is nothing."""
    tree = Tree(10, headless=60)
    try:
        watched = Watched(tree.first.pid, 40 * MB)
        look([watched])
        assert (watched.used > 60 * MB, watched.kills) == (True, 1)
    finally:
        tree.close()


def test_the_first_process_is_never_killed() -> None:
    tree = Tree()
    try:
        watched = Watched(tree.first.pid, 1)
        look([watched])
        assert (watched.kills, tree.first.poll()) == (0, None)
    finally:
        tree.close()


def test_a_sandbox_that_is_gone_is_no_harm() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    watched = Watched(gone.pid, 1)
    look([watched])
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
    watched = Watched(10, 1000 * pages)
    look([watched], str(tmp_path))
    assert watched.used == (5 - 1 + 9 - 1) * pages
