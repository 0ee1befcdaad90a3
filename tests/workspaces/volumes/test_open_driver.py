from __future__ import annotations

import os
from pathlib import Path

import pytest

from carrel.errors import Unsupported
from carrel.workspaces.volumes import BtrfsDriver, open_driver


def test_auto_takes_btrfs_where_it_can_be_had_and_stays_with_what_is_there(tmp_path: Path) -> None:
    missing = BtrfsDriver(str(tmp_path)).missing()
    best = "directory" if missing else "btrfs"
    driver = open_driver(str(tmp_path / "new"), "auto")
    assert driver.name == best
    driver.create("ctx-c", None)
    assert driver.directory == os.path.dirname(driver.path("ctx-c"))
    driver.close()
    plain = open_driver(str(tmp_path / "plain"), "directory")
    plain.create("ctx-c", None)
    plain.close()
    again = open_driver(str(tmp_path / "plain"), "auto")
    assert (again.name, again.volumes()) == ("directory", ["ctx-c"])
    again = open_driver(str(tmp_path / "new"), "auto")
    assert (again.name, again.volumes()) == (best, ["ctx-c"])
    again.close()


def test_workspaces_in_a_pool_are_never_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pool.btrfs").write_bytes(b"")
    monkeypatch.setattr(BtrfsDriver, "missing", lambda _self: "btrfs volumes need root")
    for wanted in ("auto", "btrfs"):
        with pytest.raises(Unsupported, match="need root"):
            open_driver(str(tmp_path), wanted)  # type: ignore[arg-type]
    assert open_driver(str(tmp_path / "other"), "auto").name == "directory"
