from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from carrel.control.workspaces.stored import StoredSnapshots
from carrel.errors import NotFound
from carrel.store.snapshots import SnapshotRecord, SnapshotStatus
from carrel.workspaces.archive import Archive
from carrel.workspaces.remote import Remote
from carrel.workspaces.volumes import DirectoryDriver


@pytest.mark.parametrize("where", ["here", "archive"])
def test_a_snapshot_is_used_wherever_it_lies(tmp_path: Path, where: str) -> None:
    driver = DirectoryDriver(str(tmp_path / "driver"))
    driver.open()
    archive = Archive(Remote.open(str(tmp_path / "archive")), str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    stored = StoredSnapshots(driver, archive, str(tmp_path / "work"))
    records = []
    driver.create("ctx-c", None)
    for number in range(2):
        (Path(driver.path("ctx-c")) / f"file{number}").write_text(str(number))
        driver.snapshot("ctx-c", f"snap-{number}")
        archive.store("ctx-c", f"snap-{number}", driver)
        records.append(
            SnapshotRecord(f"snap-{number}", "c", "directory", 1.0, status=SnapshotStatus.READY, archived=True)
        )
    if where == "archive":
        for record in records:
            driver.delete_snapshot(record.id)
    first, second = records
    assert [change.path for change in stored.diff(first, second)] == [b"file1"]
    with tarfile.open(fileobj=io.BytesIO(b"".join(stored.tar(second)))) as tar:
        assert {os.path.basename(name) for name in tar.getnames()} >= {"file0", "file1"}
    stored.fork(first, "ctx-d", None)
    assert os.listdir(driver.path("ctx-d")) == ["file0"]
    stored.restore(first, "ctx-c")
    assert os.listdir(driver.path("ctx-c")) == ["file0"]
    assert os.listdir(tmp_path / "work") == []


def test_one_that_is_nowhere_is_not_found(tmp_path: Path) -> None:
    driver = DirectoryDriver(str(tmp_path / "driver"))
    driver.open()
    archive = Archive(Remote.open(str(tmp_path / "archive")), str(tmp_path / "cache"))
    stored = StoredSnapshots(driver, archive, str(tmp_path))
    driver.create("ctx-c", None)
    for archived in (False, True):
        record = SnapshotRecord("snap-0", "c", "directory", 1.0, status=SnapshotStatus.READY, archived=archived)
        with pytest.raises(NotFound):
            stored.restore(record, "ctx-c")
        with pytest.raises(NotFound):
            stored.fork(record, "ctx-d", None)
        with pytest.raises(NotFound):
            b"".join(stored.tar(record))
        with pytest.raises(NotFound):
            stored.diff(record, record)
        assert driver.volumes() == ["ctx-c"]
