"""What a test left behind: processes, mounts, cgroups, temporary files, descriptors, another /etc.

Only what this run made is judged, so that two runs at once do not accuse each other: the run is a child subreaper, so
every process it made stays below it whatever it does, and everything temporary lies in a directory of this run.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from carrel.errors import PlatformError
from carrel.primitives.trees import remove_tree

_GROUP = re.compile(r"^carrel-(\d+)-(\d+)(?:-\d+)?$")
_PR_SET_CHILD_SUBREAPER = 36
PATIENCE_S = 20.0
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")
LEFT = "left behind"  # under this name a worker tells the process that leads the run

Process = tuple[int, int]  # pid and start time: together they name a process for good


@dataclass
class State:
    """What there is at one moment."""

    processes: dict[Process, int] = field(default_factory=dict)  # each with its parent
    mounts: set[str] = field(default_factory=set)
    entries: set[str] = field(default_factory=set)
    descriptors: Counter[str] = field(default_factory=Counter)
    settings: dict[str, tuple[int, ...]] = field(default_factory=dict)


class Leaks:
    """Compares the state before and after, leaving out what fixtures of a wider scope keep on purpose."""

    def __init__(self, directory: str) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.directory = directory
        self._kept = State()
        self._seen: set[Process] = set()  # every process of ours that was ever looked at: dead ones may own a cgroup
        self._look_below_kept = 0.0
        self._groups_before = {path for path, _owner in _cgroups()}
        self._first = self.look()

    def look(self, *, reap: frozenset[int] | None = None) -> State:
        """The state now. It is looked at after every test, so this must be cheap: what kept processes started is not
        judged, and only looked for once in a second. Orphans that ended are buried, but not the children named in `reap`.
        """
        now = time.monotonic()
        kept = {pid for pid, _started in self._kept.processes} if now < self._look_below_kept else set()
        if not kept:
            self._look_below_kept = now + 1
        family = _family(os.getpid(), kept)
        if reap is not None:
            _reap_orphans(family, reap)
        processes = {(each.pid, each.started): each.parent for each in family if each.state not in "ZX"}
        self._seen |= processes.keys()
        return State(processes, self._mounts(), self._entries(), _descriptors(), settings() | devices())

    def keep(self, before: State) -> None:
        """What came since `before` belongs to a fixture that lives on."""
        now = self.look()
        for process in now.processes.keys() - before.processes.keys():
            self._kept.processes[process] = now.processes[process]
        self._kept.mounts |= now.mounts - before.mounts
        self._kept.entries |= now.entries - before.entries
        self._kept.descriptors += now.descriptors - before.descriptors

    def since(self, before: State) -> tuple[list[str], State]:
        """What is there now, was not before, and is kept by nobody, one line each; and all that is there now."""
        until = time.monotonic() + PATIENCE_S
        while True:
            now = self.look(reap=frozenset(pid for pid, _started in before.processes))
            found = self._compare(before, now)
            if not found or time.monotonic() > until:
                return found, now
            gc.collect()  # an object that waits for the collector is no leak
            time.sleep(0.02)

    def at_the_end(self) -> list[str]:
        """Everything of this run that is still there once all fixtures are gone."""
        self._kept = State()
        first = State(
            self._first.processes, self._first.mounts, self._first.entries, _descriptors(), self._first.settings
        )
        found, _now = self.since(first)
        until = time.monotonic() + PATIENCE_S
        while (groups := self._groups_of_the_gone()) and time.monotonic() < until:
            time.sleep(0.05)
        return found + [f"cgroup {path}" for path in groups]

    def _compare(self, before: State, now: State) -> list[str]:
        roots = {pid for pid, _started in self._kept.processes}
        parents = {pid: parent for (pid, _started), parent in now.processes.items()}
        found = [
            f"process {pid}: {_command_line(pid)}"
            for pid, _started in now.processes.keys() - before.processes.keys() - self._kept.processes.keys()
            if not _is_below(pid, roots, parents)
        ]
        found += [f"mount {point}" for point in sorted(now.mounts - before.mounts - self._kept.mounts)]
        found += [f"temporary {name}" for name in sorted(now.entries - before.entries - self._kept.entries)]
        leaked = now.descriptors - before.descriptors - self._kept.descriptors
        found += [f"descriptor {target} ({count})" for target, count in leaked.items()]
        found += [
            f"change of the host's {path}" for path, _is in sorted(now.settings.items() ^ before.settings.items())
        ]
        return found

    def _mounts(self) -> set[str]:
        points = (line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
        return {point for point in points if point.startswith(self.directory)}

    def _entries(self) -> set[str]:
        return {entry for entry in os.listdir(self.directory) if entry != "t"}

    def _groups_of_the_gone(self) -> list[str]:
        alive = {(each.pid, each.started) for each in map(_status, _pids()) if each is not None}
        return [
            path
            for path, owner in _cgroups()
            if path not in self._groups_before and owner in self._seen and owner not in alive
        ]


class Watch:
    """The pytest plugin: each test is compared with the moment before it, the whole session with its start."""

    def __init__(self, leaks: Leaks):
        self._leaks = leaks
        self._before: State | None = None

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        """What a fixture of a wider scope makes is not a leak of the test that happens to be the first to use it."""
        if fixturedef.scope == "function":
            return (yield)
        before = self._leaks.look()
        value = yield
        self._leaks.keep(before)
        return value

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, None, None]:
        if self._before is None:  # else it is as the test before left it
            self._before = self._leaks.look()
        yield

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None, None, None]:
        yield
        assert self._before is not None
        found, self._before = self._leaks.since(self._before)
        if found:
            pytest.fail(complaint(found), pytrace=False)

    @pytest.hookimpl(wrapper=True, trylast=True)  # before a worker hands back its output
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        yield
        if found := self._leaks.at_the_end():
            if hasattr(session.config, "workeroutput"):
                session.config.workeroutput[LEFT] = found
            print("\nThe whole session " + complaint(found), file=sys.stderr)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def make_directory() -> str:
    """A directory for the temporary files of a run. Its path is short, because socket paths end at 107 bytes."""
    directory = tempfile.mkdtemp(prefix="ct-", dir=os.environ.get("TMPDIR", "/tmp"))
    os.chmod(directory, 0o755)
    return directory


def remove_directory(directory: str) -> None:
    """Remove it, however deep a test nested directories in it."""
    with suppress(OSError, PlatformError):
        remove_tree(directory)


class Status(NamedTuple):
    """A process, as /proc tells of it."""

    pid: int
    parent: int
    state: str
    started: int


def _status(pid: int) -> Status | None:
    try:
        fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        return Status(pid, int(fields[1]), fields[0].decode(), int(fields[19]))
    except (OSError, IndexError):
        return None


def _read(path: str) -> bytes:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, 65_536)
    finally:
        os.close(file)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _children(pid: int) -> list[int]:
    """Of each thread of a process. Needs a kernel with CONFIG_PROC_CHILDREN, as all distributions have."""
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return found
    for thread in threads:
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            found += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
    return found


def _family(root: int, childless: Collection[int] = ()) -> list[Status]:
    """The processes below `root`, zombies too, but not those below the ones named `childless`."""
    found, pending = [], [root]
    while pending:
        for pid in _children(pending.pop()):
            if (status := _status(pid)) is not None:
                found.append(status)
                if pid not in childless:
                    pending.append(pid)
    return found


def below(root: int) -> dict[Process, str]:
    """The living processes below `root`."""
    return {(each.pid, each.started): _command_line(each.pid) for each in _family(root) if each.state not in "ZX"}


def _is_below(pid: int, roots: set[int], parents: dict[int, int]) -> bool:
    while pid > 1:
        if pid in roots:
            return True
        pid = parents.get(pid, 0)
    return False


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return "?"


def settings(directory: str = "/etc") -> dict[str, tuple[int, ...]]:
    """The files right in /etc, as they are: no test may write to the host's, and as root it could."""
    found = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                if entry.is_file(follow_symlinks=False):
                    told = entry.stat(follow_symlinks=False)
                    found[entry.path] = (told.st_ino, told.st_mode, told.st_size, told.st_mtime_ns)
            except FileNotFoundError:  # whoever writes a file aside there takes it away again
                continue
    return found


def devices(paths: tuple[str, ...] = DEVICES) -> dict[str, tuple[int, ...]]:
    """Devices that every program uses, and whose they are: `runsc` gives its standard files to nobody."""
    stats = {path: os.stat(path) for path in paths}
    return {path: (told.st_mode, told.st_uid, told.st_gid, told.st_rdev) for path, told in stats.items()}


def _reap_orphans(family: list[Status], old: frozenset[int]) -> None:
    """Bury what was orphaned to this process; children that somebody here waits for are buried by then."""
    for each in family:
        if each.parent == os.getpid() and each.state == "Z" and each.pid not in old:
            with suppress(ChildProcessError):
                os.waitpid(each.pid, os.WNOHANG)


def _descriptors() -> Counter[str]:
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        if int(name) <= 2:  # moved about by pytest while it captures
            continue
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        # Numbers of pipes and sockets differ each time; how many of them there are must not.
        found[target.partition(":")[0] if target.startswith(("pipe:", "socket:")) else target] += 1
    found[f"/proc/{os.getpid()}/fd"] = 0
    return +found


def _cgroups() -> list[tuple[str, Process]]:
    """The groups that zygotes made, each with the process that owns it."""
    top = "/sys/fs/cgroup"
    return [
        (entry.path, (int(match[1]), int(match[2])))
        for path in (top, *(entry.path for entry in _directories(top)))
        for entry in _directories(path)
        if (match := _GROUP.match(entry.name))
    ]


def _directories(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def complaint(found: list[str]) -> str:
    """What to say of what was left behind."""
    return "left behind:\n  " + "\n  ".join(found)
