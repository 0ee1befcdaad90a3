from __future__ import annotations

from pathlib import Path

from carrel.workspaces.volumes import BtrfsDriver, DirectoryDriver
from carrel.workspaces.volumes.doctor import disk_quota


def test_it_says_who_holds_the_cap(tmp_path: Path) -> None:
    watched = disk_quota(DirectoryDriver(str(tmp_path)))
    assert (watched.status, watched.name) == ("degraded", "disk quota")
    assert watched.remedy
    held = disk_quota(BtrfsDriver(str(tmp_path)))
    assert (held.status, held.remedy) == ("ok", None)
    expected = "ok" if BtrfsDriver(str(tmp_path)).missing() is None else "degraded"
    assert disk_quota().status == expected
