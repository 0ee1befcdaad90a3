"""What every driver promises."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.trees_for_tests import mutate, picture
from tests.support.volumes import damage_of, replace_files

from carrel.errors import AlreadyExists, InvalidRequest, LimitExceeded, NotFound
from carrel.workspaces.volumes import ChangeKind, VolumeDriver

CALM = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


def write(driver: VolumeDriver, volume: str, name: str, data: bytes | str) -> str:
    path = os.path.join(driver.path(volume), name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    Path(path).write_bytes(data.encode() if isinstance(data, str) else data)
    return path


@settings(max_examples=15, deadline=None, suppress_health_check=CALM)
@given(seed=st.integers(0, 2**32))
def test_a_restore_gives_back_every_snapshot_exactly(driver: VolumeDriver, seed: int) -> None:
    rng = random.Random(seed)
    volume = f"v{os.urandom(6).hex()}"
    driver.create(volume, None)
    taken: list[tuple[str, dict[str, object]]] = []
    for number in range(4):
        mutate(driver.path(volume), rng, rng.randrange(12))
        driver.snapshot(volume, f"{volume}-{number}", taken[-1][0] if taken else None)
        taken.append((f"{volume}-{number}", picture(driver.path(volume))))
        if rng.random() < 0.3:
            name, wanted = rng.choice(taken)
            driver.restore(volume, name)
            assert picture(driver.path(volume)) == wanted
    for name, wanted in rng.sample(taken, len(taken)):
        driver.restore(volume, name)
        assert picture(driver.path(volume)) == wanted
        assert damage_of(driver, name) is None
    driver.fork(taken[1][0], f"{volume}-fork", None)
    assert picture(driver.path(f"{volume}-fork")) == taken[1][1]
    for name, _ in taken:
        driver.delete_snapshot(name)
    driver.delete_volume(volume)
    driver.delete_volume(f"{volume}-fork")
    driver.collect_garbage()
    assert driver.volumes() == driver.snapshots() == []


def test_names_and_states_that_cannot_be_are_refused(driver: VolumeDriver) -> None:
    for name in ("", ".", "..", "a/b", ".new-x", "-x", "a\n", "x" * 201):
        with pytest.raises(InvalidRequest):
            driver.create(name, None)
    driver.create("a", None)
    with pytest.raises(AlreadyExists):
        driver.create("a", None)
    with pytest.raises(NotFound):
        driver.restore("a", "none")
    with pytest.raises(NotFound):
        driver.snapshot("none", "s")
    with pytest.raises(NotFound):
        driver.usage("none")
    write(driver, "a", "big", os.urandom(200_000))
    driver.snapshot("a", "s")
    with pytest.raises(AlreadyExists):
        driver.snapshot("a", "s")
    with pytest.raises(AlreadyExists):
        driver.fork("s", "a", None)
    with pytest.raises(LimitExceeded):
        driver.fork("s", "small", 1000)
    assert not driver.exists("small")


def test_a_diff_names_what_differs_and_nothing_else(driver: VolumeDriver) -> None:
    driver.create("a", None)
    for name in ("same", "content", "mode", "touched", "gone/x", "gone/y", "swap/z"):
        write(driver, "a", name, name)
    driver.snapshot("a", "one")
    write(driver, "a", "content", "CONTENT")
    os.chmod(os.path.join(driver.path("a"), "mode"), 0o600)
    os.utime(os.path.join(driver.path("a"), "touched"), ns=(5, 5))
    for name in ("gone/x", "gone/y", "swap/z"):
        os.unlink(os.path.join(driver.path("a"), name))
    os.rmdir(os.path.join(driver.path("a"), "gone"))
    os.rmdir(os.path.join(driver.path("a"), "swap"))
    write(driver, "a", "swap", "a file now")
    write(driver, "a", "new/é", "x")
    driver.snapshot("a", "two", "one")
    added, removed, changed = ChangeKind.ADDED, ChangeKind.REMOVED, ChangeKind.CHANGED
    assert [(each.path, each.kind) for each in driver.diff("one", "two")] == [
        (b"content", changed),
        (b"gone", removed),
        (b"gone/x", removed),
        (b"gone/y", removed),
        (b"mode", changed),
        (b"new", added),
        ("new/é".encode(), added),
        (b"swap", changed),
        (b"swap/z", removed),
    ]
    assert driver.diff("two", "two") == []


def test_a_tar_holds_the_same_tree(driver: VolumeDriver, tmp_path: Path) -> None:
    driver.create("a", None)
    mutate(driver.path("a"), random.Random(7), 60)
    driver.snapshot("a", "one")
    out = tmp_path / "out"
    out.mkdir()
    argv = ["tar", "--xattrs", "--xattrs-include=user.*", "-C", str(out), "-xpf", "-"]
    subprocess.run(argv, input=b"".join(driver.export_tar("one")), check=True)
    assert picture(str(out)) == picture(driver.path("a"))


def test_depth_of_a_thousand_and_special_files(driver: VolumeDriver) -> None:
    driver.create("a", None)
    fd = os.open(driver.path("a"), os.O_RDONLY)
    for _ in range(1100):
        os.mkdir("deeper", dir_fd=fd)
        below = os.open("deeper", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(os.open("bottom", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    os.close(fd)
    os.mkfifo(os.path.join(driver.path("a"), "fifo"))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(os.path.join(driver.path("a"), "socket")))
    driver.snapshot("a", "one")
    driver.fork("one", "b", None)
    assert picture(driver.path("a")) == picture(driver.path("b"))
    driver.delete_volume("a")
    driver.delete_volume("b")


def test_sparse_files_stay_sparse(driver: VolumeDriver) -> None:
    driver.create("a", None)
    path = os.path.join(driver.path("a"), "sparse")
    with open(path, "wb") as file:
        file.truncate(80 << 20)
        file.seek(40 << 20)
        file.write(b"x" * 4096)
    driver.snapshot("a", "one")
    driver.restore("a", "one")
    os.sync()
    info = os.stat(path)
    assert info.st_size == 80 << 20
    assert info.st_blocks * 512 < 1 << 20


def test_twenty_forks_cost_no_more_than_one(driver: VolumeDriver) -> None:
    driver.create("a", None)
    for number in range(60):
        write(driver, "a", f"{number % 6}/{number}", os.urandom(20_000))
    stored = driver.snapshot("a", "one").new_bytes
    for number in range(20):
        driver.fork("one", f"f{number}", None)
        fresh = driver.snapshot(f"f{number}", f"s{number}", "one").new_bytes
        stored += max(fresh, 0)
    assert stored <= 1.1 * 60 * 20_000


def test_many_threads_write_while_garbage_is_collected(driver: VolumeDriver) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            rng = random.Random(number)
            driver.create(f"v{number}", None)
            for turn in range(5):
                write(driver, f"v{number}", f"shared{turn}", b"the same everywhere" * 500 * (turn + 1))
                write(driver, f"v{number}", f"own{turn}", rng.randbytes(3000))
                driver.snapshot(f"v{number}", f"v{number}-{turn}")
                if turn >= 2:
                    driver.delete_snapshot(f"v{number}-{turn - 2}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        driver.collect_garbage()
    assert failures == []
    driver.collect_garbage()
    for name in driver.snapshots():
        assert damage_of(driver, name) is None


@pytest.mark.parametrize(
    ("source", "target"), [("directory", "btrfs"), ("btrfs", "directory"), ("directory", "directory")]
)
def test_a_snapshot_of_one_driver_is_restored_by_the_other(source: str, target: str, make) -> None:  # type: ignore[no-untyped-def]
    one, other = make(source), make(target)
    one.create("a", None)
    mutate(one.path("a"), random.Random(3), 80)
    one.snapshot("a", "s")
    wanted = picture(one.path("a"))
    other.create("b", None)
    write(other, "b", "old", "x")
    with other.replacing("b") as directory:
        one.write_tree("s", directory)
    assert picture(other.path("b")) == wanted
    replace_files(other, "b", one.path("a"))
    assert picture(other.path("b")) == wanted
    other.snapshot("b", "t")
    assert damage_of(other, "t") is None


def test_a_file_that_never_holds_still_is_kept_as_read(driver: VolumeDriver) -> None:
    driver.create("a", None)
    path = write(driver, "a", "busy", b"x" * 4096)
    stop = threading.Event()

    def scribble() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            with open(path, "r+b") as file:
                file.write(b"%08d" % number * 512)

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        for number in range(10):
            driver.snapshot("a", f"s{number}")
    finally:
        stop.set()
        thread.join()
    driver.snapshot("a", "last")
    driver.fork("last", "b", None)
    assert picture(driver.path("b")) == picture(driver.path("a"))
