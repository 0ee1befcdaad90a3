"""Attacks by trees of directories: deeper than any path, and links between their ends. The cost to the server must grow
no faster than the number of entries, and the workspace must stay usable.
"""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.nesting import nested
from tests.support.places import volumes

from carrel.errors import LimitExceeded
from carrel.models import State
from carrel.workspaces.synced_tree import SyncedTree
from carrel.workspaces.usage import scan
from carrel.workspaces.volumes.directory import DirectoryDriver, opened
from carrel.workspaces.volumes.plain_trees import compare, copy_tree

NAME = "n" * 250
MB = 1 << 20


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[DirectoryDriver]:
    made = DirectoryDriver(str(tmp_path / "storage"))
    made.open()
    yield made
    for volume in made.volumes():
        made.delete_volume(volume)
    made.close()


def copied(driver: DirectoryDriver, volume: str) -> None:
    driver.create("copy", None)
    with opened(driver.path(volume)) as source, opened(driver.path("copy")) as target:
        copy_tree(source, target, None)
    driver.delete_volume("copy")


def forked(driver: DirectoryDriver, volume: str) -> None:
    driver.fork(f"{volume}-1", "fork", None)
    driver.delete_volume("fork")


WORK: dict[str, Callable[[DirectoryDriver, str], object]] = {
    "snapshot": lambda driver, volume: driver.snapshot(volume, f"{volume}-2"),
    "restore": lambda driver, volume: driver.restore(volume, f"{volume}-1"),
    "fork and delete": forked,
    "usage": lambda driver, volume: driver.usage(volume),
    "disk watch": lambda driver, volume: scan(driver.path(volume)),
    "copy": copied,
    "collect": lambda driver, _volume: driver.collect_garbage(),
}


def peak(work: Callable[[], object]) -> int:
    """The most memory that some work takes at once."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_cost_of_nested_directories_grows_with_their_number(driver: DirectoryDriver) -> None:
    """Twice as many levels take twice the memory, not four times."""
    peaks: dict[str, list[int]] = {name: [] for name in ("first snapshot", *WORK)}
    for volume, levels in (("a", 150), ("b", 300)):
        driver.create(volume, None)
        with nested(driver.path(volume), levels, NAME, beside=True):
            peaks["first snapshot"].append(peak(lambda volume=volume: driver.snapshot(volume, f"{volume}-1")))
            for name, work in WORK.items():
                peaks[name].append(peak(lambda work=work, volume=volume: work(driver, volume)))
            assert scan(driver.path(volume)).entries == 2 * levels
    for name, (less, more) in peaks.items():
        assert more < 3 * less, f"{name}: {less} bytes for 150 levels, {more} for 300"
        assert more < 10 * MB, name


def test_files_of_a_deep_tree_come_back_with_their_links(driver: DirectoryDriver) -> None:
    driver.create("a", None)
    with nested(driver.path("a"), 500, NAME):
        top = Path(driver.path("a"))
        here = os.open(top, os.O_RDONLY)
        (top / "first").write_text("x")
        with opened(driver.path("a")) as root:
            for _ in range(500):
                below = os.open(NAME, os.O_RDONLY, dir_fd=here)
                os.close(here)
                here = below
                os.link("first", "linked", src_dir_fd=root, dst_dir_fd=here)
        os.close(here)
        facts = driver.snapshot("a", "one")
        assert (facts.files, facts.bytes) == (501, 1)
        driver.fork("one", "b", None)
        assert os.stat(Path(driver.path("b")) / "first").st_nlink == 501
        with (
            opened(driver.path("a")) as one,
            opened(driver.path("b")) as other,
            pytest.raises(LimitExceeded, match="nested too deep"),
        ):
            compare(one, other)


def test_what_needs_paths_refuses_with_words(driver: DirectoryDriver) -> None:
    """A tar and a list of changes name every path, so they take none of more than 4,096 bytes."""
    driver.create("a", None)
    driver.snapshot("a", "before")
    tree = SyncedTree(driver.path("a"))
    try:
        with nested(driver.path("a"), 40, NAME):
            driver.snapshot("a", "after")
            assert tree.scan({}).skipped == 40 - 17  # a filespace leaves out what no path can name
            for work in (lambda: list(driver.export_tar("after")), lambda: driver.diff("before", "after")):
                with pytest.raises(LimitExceeded, match="nested too deep beneath 'nnnn") as caught:
                    work()
                assert "rm -rf" in str(caught.value)
        driver.snapshot("a", "mended")
        assert driver.diff("before", "mended") == [] and list(driver.export_tar("mended")) and tree.scan({}).files == {}
    finally:
        tree.close()


def attack():
    import os

    for _ in range(1600):
        os.mkdir("n" * 250)
        os.chdir("n" * 250)


def memory(pid: int) -> int:
    """The most memory a process has had, in bytes."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def test_a_sandbox_nests_directories_to_fill_the_memory_of_the_server(attacker):
    """1,600 levels, 250 characters each: 320 MB of paths. Checkpoint, stop, start, restore and delete go on as ever."""
    client = attacker.server.client
    before = memory(attacker.server.pid)
    box = attacker.another("nesting", filespace=True)
    box.commands.run("echo kept > file")
    good = box.snapshot()
    attacker.run(attack, box=box)
    deep = box.snapshot()
    assert deep.status == "ready"
    assert box.usage().bytes >= 0
    box.stop()
    stopped = client.find("nesting")
    assert (stopped.state, stopped.error, stopped.notice) == (State.STOPPED, None, None)
    box = client.sandbox(context_id="nesting")
    assert box.commands.run("cat file; ls -d n* | wc -l").stdout == "kept\n1\n"
    box.commands.run("rm -rf n*")
    box.stop()
    assert client.find("nesting").state is State.STOPPED
    box = client.sandbox(context_id="nesting")
    box.restore(deep.id)
    box = client.sandbox(context_id="nesting")
    assert box.commands.run("ls -d n* | wc -l").stdout == "1\n"
    box.restore(good.id)
    assert memory(attacker.server.pid) - before < 150 * MB
    place = volumes(attacker.server.data_dir) / "ctx-nesting"
    assert place.exists()
    client.sandbox(context_id="nesting").terminate(delete_files=True)
    assert not place.exists()
