"""What only the directory driver promises: cost follows change, damage is named, a kill or a full disk loses nothing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from trees_for_tests import mutate, picture

from carrel.errors import PlatformError, SnapshotDamaged
from carrel.workspaces.volumes import DirectoryDriver, VolumeDriver

HERE = Path(__file__).parent


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
    from carrel.workspaces.volumes import kernel

    real = kernel.open_for_reading

    def counting(name: str, parent: int, flags: int = kernel.FILE) -> int:
        if flags == kernel.FILE:
            opened.append(name)
        return real(name, parent, flags)

    monkeypatch.setattr(kernel, "open_for_reading", counting)
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


def test_what_was_collected_is_stored_again(directory: VolumeDriver) -> None:
    filled(directory)
    settle()
    directory.snapshot("a", "one")
    directory.delete_snapshot("one")
    assert directory.collect_garbage().objects > 40
    facts = directory.snapshot("a", "two")
    assert facts.new_bytes > 3 << 20
    assert directory.verify("two") == []


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
    problems = driver.verify("one")
    assert problems
    assert all("object " in problem for problem in problems)
    with pytest.raises(SnapshotDamaged, match=r"object [0-9a-f]{64} "):
        driver.restore("a", "one")
    assert picture(root) == before
    assert driver.volumes() == os.listdir(tmp_path / "s" / "volumes") == ["a"]
    Path(f"{root}/0/0").write_bytes(random.Random(0).randbytes(3000))
    driver.snapshot("a", "mended")
    assert driver.verify("mended") == []


def test_a_damaged_record_is_named_and_stops_the_collection(directory: VolumeDriver, tmp_path: Path) -> None:
    filled(directory, 3)
    directory.snapshot("a", "one")
    record = next(tmp_path.rglob("snapshots/one"))
    record.chmod(0o600)
    record.write_bytes(record.read_bytes().replace(b'"version": 1', b'"version": 2'))
    assert "one" in directory.verify("one")[0]
    for call in (lambda: directory.restore("a", "one"), directory.collect_garbage):
        with pytest.raises(SnapshotDamaged):
            call()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
def test_a_full_disk_fails_cleanly(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(place)], check=True)
    try:
        driver = DirectoryDriver(str(place / "s"))
        driver.open()
        root = filled(driver)
        driver.snapshot("a", "one")
        before = picture(root)
        driver.fork("one", "b", None)
        with pytest.raises(PlatformError, match="No space left"):
            driver.fork("one", "c", None)
        with pytest.raises(PlatformError, match="No space left"):
            driver.restore("a", "one")
        assert picture(root) == before
        assert driver.volumes() == ["a", "b"]
        driver.delete_volume("b")
        Path(f"{root}/more").write_bytes(os.urandom(4 << 20))
        with pytest.raises(PlatformError, match="No space left"):
            driver.snapshot("a", "two")
        assert driver.snapshots() == ["one"]
        assert driver.verify("one") == []
        os.unlink(f"{root}/more")
        driver.collect_garbage()
        driver.snapshot("a", "three")
        assert driver.verify("three") == []
    finally:
        subprocess.run(["umount", str(place)], check=True)


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
from trees_for_tests import mutate
from carrel.workspaces.volumes import DirectoryDriver
from carrel.workspaces.volumes import capture, copying, objects, rebuild, directory, kernel
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
        arguments = [sys.executable, "-c", KILLED, place, str(after), str(number), str(HERE), what]
        code = subprocess.run(arguments, check=False).returncode
        assert code in {0, -signal.SIGKILL}
        ended += code == 0
        driver = DirectoryDriver(place)
        driver.open()
        assert picture(driver.path("a")) in ([before, one] if what == "restore" else [before])
        assert driver.volumes() == os.listdir(tmp_path / "s" / "volumes") == ["a"]
        assert os.listdir(tmp_path / "s" / "tmp") == []
        for name in driver.snapshots():
            assert driver.verify(name) == []
        if "two" in driver.snapshots():
            driver.fork("two", "b", None)
            assert picture(driver.path("b")) == before
            driver.delete_volume("b")
            driver.delete_snapshot("two")
    assert ended
