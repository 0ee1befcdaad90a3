"""What only the directory driver promises: cost follows change, damage is named, a kill or a full disk loses nothing."""

from __future__ import annotations

import filecmp
import mmap
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.trees_for_tests import mutate, picture
from tests.support.volumes import damage_of, unmount

from carrel.errors import PlatformError, SnapshotDamaged
from carrel.primitives import libc, walk
from carrel.workspaces.volumes import DirectoryDriver, VolumeDriver

ROOT = Path(__file__).parents[3]


def settle() -> None:
    """Pass the moment in which a change would not show in a file's times."""
    began = time.time_ns()
    while time.time_ns() - began < 30_000_000:
        time.sleep(0.005)


def filled(driver: VolumeDriver, files: int = 40) -> str:
    driver.create("a", None)
    root = driver.path("a")
    for number in range(files):
        os.makedirs(f"{root}/{number % 5}", exist_ok=True)
        Path(f"{root}/{number % 5}/{number}").write_bytes(random.Random(number).randbytes(3000))
    Path(f"{root}/big").write_bytes(random.Random(0).randbytes(3 << 20))
    return root


def test_a_second_snapshot_reads_and_stores_only_what_changed(
    directory: VolumeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = filled(directory)
    settle()
    assert directory.snapshot("a", "one").new_bytes > 3 << 20
    assert directory.snapshot("a", "same").new_bytes == 0
    opened: list[str] = []
    real = walk.open_for_reading

    def counting(name: str, parent: int, flags: int = walk.FILE) -> int:
        if flags == walk.FILE:
            opened.append(name)
        return real(name, parent, flags)

    monkeypatch.setattr(walk, "open_for_reading", counting)
    Path(f"{root}/3/3").write_bytes(b"changed")
    facts = directory.snapshot("a", "two")
    assert opened == ["3"]
    assert 0 < facts.new_bytes < 5000
    assert [change.path for change in directory.diff("one", "two")] == [b"3/3"]


def test_a_snapshot_after_a_restore_stores_nothing(directory: VolumeDriver) -> None:
    filled(directory)
    directory.snapshot("a", "one")
    directory.restore("a", "one")
    assert directory.snapshot("a", "two").new_bytes == 0


@pytest.mark.parametrize("tells", [True, False])
def test_a_write_through_a_memory_map_to_a_dirty_page_is_not_missed(
    directory: VolumeDriver, monkeypatch: pytest.MonkeyPatch, tells: bool
) -> None:
    if not tells:
        monkeypatch.setattr(libc, "_CACHESTAT", 9999)  # as on an older kernel
    directory.create("a", None)
    path = os.path.join(directory.path("a"), "x")
    Path(path).write_bytes(bytes(3 * 4096))
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 3 * 4096) as memory:
        for turn in range(6):
            memory[5000] = turn + 1  # the page is dirty, and stays writable
            settle()
            before = os.stat(path).st_mtime_ns
            directory.snapshot("a", f"one{turn}")
            memory[5001] = turn + 1
            settle()
            directory.snapshot("a", f"two{turn}")
            assert os.stat(path).st_mtime_ns > before
            directory.fork(f"two{turn}", f"fork{turn}", None)
            copy = Path(directory.path(f"fork{turn}"), "x").read_bytes()
            assert copy[5000:5002] == bytes([turn + 1, turn + 1])


def test_large_and_large_sparse_files_come_back(directory: VolumeDriver) -> None:
    directory.create("a", None)
    root = directory.path("a")
    block = random.Random(3).randbytes(1 << 20)
    with open(f"{root}/large", "wb") as file:
        file.writelines(number.to_bytes(4, "big") + block[4:] for number in range(70))
    with open(f"{root}/sparse", "wb") as file:
        file.write(b"start")
        file.seek(100 << 20)
        file.writelines(block for _ in range(66))
        file.truncate(300 << 20)
    settle()
    directory.snapshot("a", "one")
    with open(f"{root}/large", "r+b") as file:
        file.seek(69 << 20)
        file.write(b"changed")
    settle()
    assert directory.snapshot("a", "two").new_bytes < 8 << 20  # only the piece that changed
    for name in ("one", "two"):
        assert damage_of(directory, name) is None
        directory.fork(name, f"f{name}", None)
        sparse = os.stat(os.path.join(directory.path(f"f{name}"), "sparse"))
        assert sparse.st_size == 300 << 20
        assert sparse.st_blocks * 512 < 70 << 20
    for name in ("sparse", "large"):
        assert filecmp.cmp(f"{root}/{name}", os.path.join(directory.path("ftwo"), name), shallow=False)
    assert [change.path for change in directory.diff("one", "two")] == [b"large"]


def test_what_was_collected_is_stored_again(directory: VolumeDriver) -> None:
    filled(directory)
    settle()
    directory.snapshot("a", "one")
    directory.delete_snapshot("one")
    assert directory.collect_garbage().objects > 40
    facts = directory.snapshot("a", "two")
    assert facts.new_bytes > 3 << 20
    assert damage_of(directory, "two") is None


def stored_files(root: Path) -> list[Path]:
    return sorted(path for kind in ("objects", "packs") for path in (root / kind).rglob("*") if path.is_file())


@pytest.mark.parametrize("how", ["flip", "truncate", "remove"])
@pytest.mark.parametrize("which", [0, -1])
def test_damage_is_named_and_a_restore_refuses(tmp_path: Path, how: str, which: int) -> None:
    driver = DirectoryDriver(str(tmp_path / "s"))
    driver.open()
    root = filled(driver)
    driver.snapshot("a", "one")
    Path(f"{root}/0/0").write_bytes(b"newer")
    before = picture(root)
    victim = stored_files(tmp_path / "s")[which]
    os.chmod(victim, 0o600)
    if how == "flip":
        raw = bytearray(victim.read_bytes())
        raw[len(raw) // 2] ^= 1
        victim.write_bytes(raw)
    elif how == "truncate":
        os.truncate(victim, victim.stat().st_size // 2)
    else:
        victim.unlink()
    driver = DirectoryDriver(str(tmp_path / "s"))
    driver.open()
    assert "object " in (damage_of(driver, "one") or "")
    with pytest.raises(SnapshotDamaged, match=r"object [0-9a-f]{64} "):
        driver.restore("a", "one")
    assert picture(root) == before
    assert driver.volumes() == os.listdir(tmp_path / "s" / "volumes") == ["a"]
    Path(f"{root}/0/0").write_bytes(random.Random(0).randbytes(3000))
    driver.snapshot("a", "mended")
    assert damage_of(driver, "mended") is None


def spoil(record: Path) -> None:
    record.chmod(0o600)
    record.write_bytes(record.read_bytes().replace(b'"version": 1', b'"version": 2'))


def test_what_a_damaged_record_may_need_is_kept_and_the_rest_is_collected(
    directory: VolumeDriver, tmp_path: Path
) -> None:
    root = filled(directory, 30)
    directory.snapshot("a", "gone")
    Path(f"{root}/0/0").write_bytes(os.urandom(5000))
    Path(f"{root}/big").write_bytes(os.urandom(3 << 20))
    directory.snapshot("a", "one")
    wanted = picture(root)
    directory.delete_snapshot("gone")
    directory.collect_garbage()  # rewrites packs: they are newer than the record now
    record = next(tmp_path.rglob("snapshots/one"))
    intact = record.read_bytes()
    spoil(record)
    assert "one" in (damage_of(directory, "one") or "")
    with pytest.raises(SnapshotDamaged):
        directory.restore("a", "one")
    for turn in range(3):
        settle()
        for name in os.listdir(root):
            if os.path.isfile(f"{root}/{name}"):
                os.unlink(f"{root}/{name}")
        Path(f"{root}/big{turn}").write_bytes(os.urandom(2 << 20))
        directory.snapshot("a", f"later{turn}")
        if turn:
            directory.delete_snapshot(f"later{turn - 1}")
        collected = directory.collect_garbage()
        assert collected.damaged == ("one",)
        assert (collected.bytes > 1 << 20) == (turn > 1)  # what came after it was noticed is collected as ever
        assert damage_of(directory, f"later{turn}") is None
    record.write_bytes(intact)  # somebody mends it
    assert damage_of(directory, "one") is None
    directory.fork("one", "b", None)
    assert picture(directory.path("b")) == wanted
    spoil(record)
    directory.delete_snapshot("one")
    collected = directory.collect_garbage()
    assert collected.damaged == ()
    assert collected.bytes > 3 << 20


def test_a_damaged_directory_does_not_stop_the_collection(directory: VolumeDriver, tmp_path: Path) -> None:
    filled(directory, 30)
    directory.snapshot("a", "one")
    settle()
    Path(directory.path("a"), "later").write_bytes(os.urandom(2 << 20))
    directory.snapshot("a", "two")
    first, _ = sorted(tmp_path.rglob("packs/*"), key=lambda path: path.stat().st_mtime_ns)
    first.unlink()
    directory.delete_snapshot("two")
    again = DirectoryDriver(str(next(tmp_path.glob("directory*"))))
    again.open()
    assert again.collect_garbage().damaged == ("one",)
    again.delete_snapshot("one")
    collected = again.collect_garbage()
    assert collected.damaged == ()
    assert collected.bytes > 5 << 20
    again.snapshot("a", "three")
    assert damage_of(again, "three") is None


COLLECT = """
import sys
from carrel.workspaces.volumes import DirectoryDriver
driver = DirectoryDriver(sys.argv[1])
driver.open()
for _ in range(int(sys.argv[2])):
    driver.collect_garbage()
"""


def test_two_processes_collect_while_a_third_writes(tmp_path: Path) -> None:
    place = str(tmp_path / "s")
    driver = DirectoryDriver(place)
    driver.open()
    root = filled(driver, 20)
    collectors = [subprocess.Popen([sys.executable, "-c", COLLECT, place, "40"]) for _ in range(2)]
    turn = 0
    while turn < 6 or any(process.poll() is None for process in collectors):
        Path(f"{root}/{turn % 5}/{turn % 20}").write_bytes(os.urandom(4000))
        driver.snapshot("a", f"s{turn}")
        if turn > 1:
            driver.delete_snapshot(f"s{turn - 2}")
        driver.collect_garbage()
        turn += 1
    assert [process.wait() for process in collectors] == [0, 0]
    assert driver.snapshots() == sorted([f"s{turn - 2}", f"s{turn - 1}"])
    for name in driver.snapshots():
        assert damage_of(driver, name) is None
    driver.fork(f"s{turn - 1}", "b", None)
    assert picture(driver.path("b")) == picture(root)


@contextmanager
def small_disk(place: Path, kind: str) -> Iterator[Path]:
    place.mkdir()
    if kind == "tmpfs":
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(place)], check=True)
    else:
        with open(f"{place}.image", "wb") as file:
            file.truncate(20 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", f"{place}.image"], check=True)
        subprocess.run(["mount", "-o", "loop", f"{place}.image", str(place)], check=True)
    try:
        yield place
    finally:
        unmount(str(place))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_disk_fails_cleanly(tmp_path: Path, kind: str) -> None:
    with small_disk(tmp_path / "small", kind) as place:
        driver = DirectoryDriver(str(place / "s"))
        driver.open()
        root = filled(driver)
        driver.snapshot("a", "one")
        before = picture(root)
        driver.fork("one", "b", None)
        if kind == "ext4":
            with pytest.raises(OSError, match="No space left"), open(place / "others", "wb") as file:
                for _ in range(200):
                    file.write(bytes(100_000))
                    file.flush()
            os.truncate(place / "others", os.stat(place / "others").st_size - 1_000_000)
        for refused in (lambda: driver.fork("one", "c", None), lambda: driver.restore("a", "one")):
            with pytest.raises(PlatformError, match="No space left"):
                refused()
        assert picture(root) == before
        assert driver.volumes() == ["a", "b"]
        driver.delete_volume("b")
        Path(f"{root}/more").write_bytes(os.urandom(4 << 20 if kind == "tmpfs" else 3 << 20))
        with pytest.raises(PlatformError, match="No space left"):
            driver.snapshot("a", "two")
        assert driver.snapshots() == ["one"]
        assert damage_of(driver, "one") is None
        os.unlink(f"{root}/more")
        driver.collect_garbage()
        driver.snapshot("a", "three")
        assert damage_of(driver, "three") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_garbage_is_collected_on_a_full_disk(tmp_path: Path, kind: str) -> None:
    with small_disk(tmp_path / "small", kind) as place:
        driver = DirectoryDriver(str(place / "s"))
        driver.open()
        root = filled(driver)
        driver.snapshot("a", "one")
        os.unlink(f"{root}/big")
        Path(f"{root}/0/0").write_bytes(b"changed")
        for number in range(1, 25):  # most of the first pack becomes garbage, but not all of it
            os.unlink(f"{root}/{number % 5}/{number}")
        settle()
        driver.snapshot("a", "two")
        driver.delete_snapshot("one")
        with pytest.raises(OSError, match="No space left"), open(place / "others", "wb", buffering=0) as file:
            while True:
                file.write(os.urandom(50_000)[:50_000])
        assert driver.collect_garbage().bytes >= 3 << 20
        assert damage_of(driver, "two") is None
        driver.collect_garbage()
        driver.snapshot("a", "three")
        driver.restore("a", "two")
        assert damage_of(driver, "three") is None


FORBIDDEN = """
import os, stat, sys
from carrel.workspaces.volumes import DirectoryDriver
driver = DirectoryDriver(sys.argv[1])
driver.open()
driver.create("a", None)
root = driver.path("a")
os.mkdir(root + "/d")
for name in ("f", "d/g"):
    with open(f"{root}/{name}", "w") as file:
        file.write(name)
    os.chmod(f"{root}/{name}", 0)
os.chmod(root + "/d", 0o500)
driver.snapshot("a", "one")
assert stat.S_IMODE(os.stat(root + "/f").st_mode) == 0
os.chmod(root, 0o500)
driver.restore("a", "one")
driver.fork("one", "b", None)
root = driver.path("b")
assert stat.S_IMODE(os.stat(root + "/f").st_mode) == 0
assert stat.S_IMODE(os.stat(root + "/d").st_mode) == 0o500
os.chmod(root + "/d/g", 0o400)
assert open(root + "/d/g").read() == "d/g"
driver.delete_volume("a")
driver.delete_volume("b")
assert os.listdir(os.path.dirname(root)) == []
"""


def test_an_ordinary_user_keeps_files_that_forbid_reading(tmp_path: Path) -> None:
    place = tmp_path / "user"
    place.mkdir()
    place.chmod(0o777)
    for parent in place.parents:
        if parent.is_relative_to(tempfile.gettempdir()):
            parent.chmod(0o755)
    user = 65534 if os.geteuid() == 0 else None
    subprocess.run([sys.executable, "-c", FORBIDDEN, str(place / "s")], check=True, user=user)


KILLED = """
import os, random, signal, sys
sys.path.insert(0, sys.argv[4])
from tests.support.trees_for_tests import mutate
from carrel.workspaces.volumes import DirectoryDriver
from carrel.workspaces.volumes import capture, plain_trees, objects, rebuild, directory
left = int(sys.argv[2])
def guarded(name):
    real = getattr(os, name)
    def call(*arguments, **named):
        global left
        left -= 1
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **named)
    setattr(os, name, call)
for name in ("rename", "link", "unlink", "fsync", "mkdir", "write", "utime", "rmdir"):
    guarded(name)
driver = DirectoryDriver(sys.argv[1])
driver.open()
mutate(driver.path("a"), random.Random(int(sys.argv[3])), 0)
if sys.argv[5] == "snapshot":
    driver.snapshot("a", "two")
elif sys.argv[5] == "restore":
    driver.restore("a", "one")
else:
    driver.collect_garbage()
"""


@pytest.mark.parametrize("what", ["snapshot", "restore", "collect"])
def test_a_kill_leaves_the_old_or_the_new(tmp_path: Path, what: str) -> None:
    place = str(tmp_path / "s")
    driver = DirectoryDriver(place)
    driver.open()
    driver.create("a", None)
    mutate(driver.path("a"), random.Random(1), 25)
    driver.snapshot("a", "gone")
    mutate(driver.path("a"), random.Random(2), 10)
    driver.snapshot("a", "one")
    driver.delete_snapshot("gone")
    one = picture(driver.path("a"))
    ended = 0
    for number, after in enumerate((1, 2, 3, 4, 5, 6, 8, 11, 15, 22, 30, 45, 60, 90, 150, 10_000)):
        mutate(driver.path("a"), random.Random(100 + number), 4)
        before = picture(driver.path("a"))
        arguments = [sys.executable, "-c", KILLED, place, str(after), str(number), str(ROOT), what]
        code = subprocess.run(arguments, check=False).returncode
        assert code in {0, -signal.SIGKILL}
        ended += code == 0
        driver = DirectoryDriver(place)
        driver.open()
        assert picture(driver.path("a")) in ([before, one] if what == "restore" else [before])
        assert driver.volumes() == os.listdir(tmp_path / "s" / "volumes") == ["a"]
        assert os.listdir(tmp_path / "s" / "tmp") == []
        for name in driver.snapshots():
            assert damage_of(driver, name) is None
        if "two" in driver.snapshots():
            driver.fork("two", "b", None)
            assert picture(driver.path("b")) == before
            driver.delete_volume("b")
            driver.delete_snapshot("two")
    assert ended
