from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from tests.support.trees_for_tests import mutate, picture
from tests.support.volumes import replace_files

from carrel.errors import NotFound, SnapshotDamaged
from carrel.workspaces.volumes import BtrfsDriver, VolumeDriver
from carrel.workspaces.volumes.capture import Known
from carrel.workspaces.volumes.exporting import Exported
from carrel.workspaces.volumes.objects import Batch, ObjectStore, Reader
from carrel.workspaces.volumes.rebuild import rebuild


@pytest.fixture
def target(tmp_path: Path) -> ObjectStore:
    """Where objects go."""
    store = ObjectStore(str(tmp_path / "target"))
    store.prepare()
    return store


def export(driver: VolumeDriver, snapshot_id: str, target: ObjectStore, known: Known) -> tuple[Exported, int]:
    """Export it; what came of it and how many bytes were stored."""
    target.refresh()
    with Batch(target) as batch:
        exported = driver.export_objects(snapshot_id, target, batch, known)
        batch.finish()
        return exported, batch.stored


def rebuilt(target: ObjectStore, tree: bytes, path: Path) -> dict[str, Any]:
    """The picture of what was exported."""
    path.mkdir(mode=0o700)
    fd = os.open(path, os.O_RDONLY)
    try:
        with Reader(target) as reader:
            rebuild(target, reader, tree, fd, None)
    finally:
        os.close(fd)
    return picture(str(path))


def test_a_snapshot_becomes_the_same_objects_whichever_driver_has_it(
    driver: VolumeDriver, directory: VolumeDriver, target: ObjectStore, tmp_path: Path
) -> None:
    driver.create("v", None)
    path = driver.path("v")
    rng = random.Random(4)
    known: Known = {}
    for number in range(5):
        mutate(path, rng, 40)
        expected = picture(path)
        driver.snapshot("v", f"s{number}")
        exported, stored = export(driver, f"s{number}", target, known)
        known = exported.known
        assert rebuilt(target, exported.tree, tmp_path / f"out{number}") == expected
        assert stored > 0
        assert all(target.has(key, 0) or target.has(key, 2 << 20) for key in exported.needed)
        assert export(driver, f"s{number}", target, known)[1] == 0
        assert export(driver, f"s{number}", target, {})[1] == 0
    directory.create("other", None)
    replace_files(directory, "other", path)
    directory.snapshot("other", "o")
    assert export(directory, "o", target, {})[0].tree == exported.tree


def test_what_the_other_store_lost_is_read_again(driver: VolumeDriver, target: ObjectStore, tmp_path: Path) -> None:
    driver.create("v", None)
    mutate(driver.path("v"), random.Random(8), 40)
    driver.snapshot("v", "s")
    first, stored = export(driver, "s", target, {})
    other = ObjectStore(str(tmp_path / "other"))
    other.prepare()
    assert export(driver, "s", other, first.known)[1] == stored
    assert rebuilt(other, first.tree, tmp_path / "out") == picture(driver.path("v"))


def test_a_missing_or_damaged_snapshot_is_told(driver: VolumeDriver, target: ObjectStore) -> None:
    with pytest.raises(NotFound):
        export(driver, "never", target, {})
    driver.create("v", None)
    Path(driver.path("v"), "file").write_bytes(os.urandom(2 << 20))
    driver.snapshot("v", "s")
    if isinstance(driver, BtrfsDriver):
        return
    [loose] = Path(driver.path("v")).parents[1].glob("objects/*/*")
    loose.unlink()
    with pytest.raises(SnapshotDamaged):
        export(driver, "s", target, {})


def test_a_snapshot_removed_meanwhile_is_not_taken_for_an_empty_one(
    directory: VolumeDriver, make: Any, target: ObjectStore
) -> None:
    driver = make("btrfs")
    driver.create("v", None)
    for number in range(30):
        folder = Path(driver.path("v"), f"d{number}")
        folder.mkdir()
        (folder / "file").write_text(str(number))
    driver.snapshot("v", "s")

    class Deleting(Batch):
        """Removes the snapshot when the first object comes."""

        def put(self, data: bytes) -> bytes:
            driver.delete_snapshot("s")
            return super().put(data)

        def put_all(self, contents: list[bytes]) -> list[bytes]:
            driver.delete_snapshot("s")
            return super().put_all(contents)

    with Deleting(target) as batch, pytest.raises(NotFound):
        driver.export_objects("s", target, batch, {})
