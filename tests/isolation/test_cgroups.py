"""What a host offers, read from its own words, and groups that are really made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.sandboxes import ROOT

from carrel.errors import PlatformError
from carrel.isolation.cgroups import (
    Cgroups,
    Hierarchy,
    group_usage,
    hierarchies,
    host_memory_mb,
    memory_limits,
    settings,
    start_time,
    sweep,
)
from carrel.primitives.kernel_files import write

V1 = """\
24 29 0:22 / /sys rw,nosuid - sysfs sysfs rw
31 30 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:11 - cgroup cgroup rw,cpu,cpuacct
32 30 0:28 / /sys/fs/cgroup/memory rw,nosuid shared:12 master:1 - cgroup cgroup rw,memory
33 30 0:29 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids
34 30 0:30 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd
"""
V2 = "30 24 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
UNIFIED = "35 30 0:31 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
CPU, MEMORY = (
    Hierarchy("/sys/fs/cgroup/cpu,cpuacct", 1, ("cpu", "cpuacct")),
    Hierarchy("/sys/fs/cgroup/memory", 1, ("memory",)),
)
as_root = pytest.mark.skipif(not ROOT, reason="an ordinary user's own group is used instead of the top")


@as_root
@pytest.mark.parametrize(
    ("mountinfo", "expected"),
    [
        ("", []),
        ("24 29 0:22 / /sys rw - sysfs sysfs rw\n", []),
        ("nonsense\n\n1 2 3\n - cgroup2 x y\n", []),
        (V1, [CPU, MEMORY]),
        (V2, [Hierarchy("/sys/fs/cgroup", 2, ("memory", "cpu"))]),
        (V1 + UNIFIED, [CPU, MEMORY, Hierarchy("/sys/fs/cgroup/unified", 2, ("memory", "cpu"))]),
        (
            "1 2 0:1 / /mnt/a\\040b\\134é rw - cgroup none rw,memory,cpu\n",
            [Hierarchy("/mnt/a b\\é", 1, ("memory", "cpu"))],
        ),
    ],
    ids=["empty", "none", "nonsense", "v1", "v2", "hybrid", "escaped"],
)
def test_hierarchies(mountinfo: str, expected: list[Hierarchy]) -> None:
    assert hierarchies(mountinfo, "0::/\n") == expected


@given(st.text(max_size=300), st.text(max_size=100))
def test_any_words_of_the_kernel_are_survived(mountinfo: str, own: str) -> None:
    assert all(found.version in {1, 2} for found in hierarchies(mountinfo, own))


@pytest.mark.parametrize(
    ("version", "controller", "memory_mb", "cpus", "expected"),
    [
        (2, "memory", 64, None, {"memory.max": "67108864", "memory.swap.max": "0", "memory.oom.group": "0"}),
        (1, "memory", 64, None, {"memory.limit_in_bytes": "67108864", "memory.memsw.limit_in_bytes": "67108864"}),
        (2, "cpu", None, 0.5, {"cpu.max": "50000 100000"}),
        (1, "cpu", None, 0.5, {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "50000"}),
        (1, "cpu", None, 0.0001, {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "1000"}),
        (1, "cpu", 64, None, {}),
        (2, "memory", None, 1.0, {}),
        (2, "cpu", None, 100000.0, {}),
    ],
)
def test_settings(
    version: int, controller: str, memory_mb: int | None, cpus: float | None, expected: dict[str, str]
) -> None:
    assert settings(version, controller, memory_mb, cpus) == expected


def test_groups_are_made_limited_and_removed() -> None:
    groups = Cgroups.open()
    try:
        if not groups.controllers:
            pytest.skip(f"no cgroup can be made here: {groups.reason}")
        groups.make("one").close()
        with pytest.raises(PlatformError, match="could not be made"):
            groups.make("one")
        groups.make("one").close()  # the failure took the group along
        groups.limit("one", 64, 0.5)
        assert groups.usage("one").keys() >= (
            {"memory_bytes", "oom_kills"} if "memory" in groups.controllers else set()
        )
        assert groups.usage("none") == {}
        with pytest.raises(PlatformError, match="could not be set"):
            groups.limit("none", 64, 0.5)
        assert groups.remove("one")
        assert groups.remove("one")
    finally:
        groups.close()
    assert not _mine(os.getpid())


@as_root
def test_groups_of_the_dead_are_swept() -> None:
    script = "from carrel.isolation.cgroups import Cgroups\ng = Cgroups.open()\ng.make('left').close()\nimport os\nos.kill(os.getpid(), 9)"
    child = subprocess.Popen([sys.executable, "-c", script])
    child.wait()
    sweep()
    assert not _mine(child.pid)


def _mine(pid: int) -> list[Path]:
    top = Path("/sys/fs/cgroup")
    return [*top.glob(f"carrel-{pid}-*"), *top.glob(f"*/carrel-{pid}-*")]


def test_a_process_is_named_by_its_start(tmp_path: Path) -> None:
    assert start_time(os.getpid()) > 0
    assert start_time(2**22 + 1) == 0
    for pid, words in (
        (1, "1 (a) b) c) S 1" + " 0" * 17 + " 77 0"),
        (2, "2 (x) Z 1" + " 0" * 17 + " 77 0"),
        (3, "3 (x)"),
    ):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(words)
    assert [start_time(pid, str(tmp_path)) for pid in (1, 2, 3)] == [77, 0, 0]


def test_memory_of_the_host_is_bounded_by_the_groups_around(tmp_path: Path) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    for path, limit in ((tmp_path, None), (tmp_path / "outer", "1073741824\n"), (inner, "max\n")):
        (path / "cgroup.procs").touch()
        if limit is not None:
            (path / "memory.max").write_text(limit)
    (inner / "memory.limit_in_bytes").write_text("536870912\n")
    assert memory_limits([Hierarchy(str(inner), 2, ("memory", "cpu"))]) == [1 << 30]
    assert memory_limits([Hierarchy(str(inner), 1, ("memory",))]) == [1 << 29]
    assert memory_limits([Hierarchy(str(inner), 1, ("cpu",)), Hierarchy(str(tmp_path / "none"), 2, ("memory",))]) == []
    assert 0 < host_memory_mb() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // (1 << 20)


def test_a_process_has_groups_twice() -> None:
    """The provider of gVisor and the probe of the host make groups in one process, and end in any order."""
    first, second = Cgroups.open(), Cgroups.open()
    try:
        assert first.controllers == second.controllers
        first.close()
        second.make("later").close()
        second.remove("later")
    finally:
        second.close()


def test_a_group_counts_its_processor_time_and_its_peak() -> None:
    groups = Cgroups.open()
    try:
        if "memory" not in groups.controllers or not groups.controllers & {"cpu", "cpuacct"}:
            pytest.skip("this host has no groups for this")
        entry = groups.make("one")
        program = "x = bytearray(32 << 20)\nimport time\nbegan = time.process_time()\nwhile time.process_time() < began + 0.2: pass"
        if entry.into >= 0:
            worker = subprocess.Popen([sys.executable, "-c", f"input()\n{program}"], stdin=subprocess.PIPE)
            write("one/cgroup.procs", str(worker.pid), dir_fd=next(iter(groups._directories.values()))[1])
            worker.communicate(b"\n")
        else:
            subprocess.run([sys.executable, "-c", program], preexec_fn=entry.enter, check=True)
        entry.close()
        used = groups.usage("one")
        assert used["cpu_us"] >= 200_000
        assert "memory_peak_bytes" not in used or used["memory_peak_bytes"] > 32 << 20
        assert groups.remove("one")
    finally:
        groups.close()


def test_what_a_group_of_version_2_says(tmp_path: Path) -> None:
    group = str(tmp_path)
    assert group_usage(2, group) == {}
    said = {
        "memory.current": "4096\n",
        "memory.peak": "8192\n",
        "memory.events": "low 0\nhigh 0\nmax 7\noom 3\noom_kill 2\noom_group_kill 0\n",
        "cpu.stat": "usage_usec 1500000\nuser_usec 1000000\nsystem_usec 500000\n",
    }
    for name, text in said.items():
        (tmp_path / name).write_text(text)
    everything = {"memory_bytes": 4096, "memory_peak_bytes": 8192, "oom_kills": 2, "cpu_us": 1_500_000}
    assert group_usage(2, group) == everything
    (tmp_path / "memory.peak").unlink()  # before Linux 5.19
    (tmp_path / "cpu.stat").write_text("nonsense")
    assert group_usage(2, group) == {"memory_bytes": 4096, "oom_kills": 2}
