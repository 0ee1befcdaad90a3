"""The watch over what tests leave behind sees what it is for."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.leaks import devices, settings


def test_a_change_of_the_hosts_settings_is_seen_and_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "passwd").write_text("root")
    outside = tmp_path / "d"
    outside.mkdir()
    (outside / "file").write_text("x")
    os.symlink(outside / "file", tmp_path / "link")
    before = settings(str(tmp_path))
    assert before.keys() == {str(tmp_path / "passwd")}
    assert settings(str(tmp_path)) == before
    (tmp_path / "passwd").write_text("rot")
    assert settings(str(tmp_path)) != before


def test_a_device_that_is_given_away_is_seen(tmp_path: Path) -> None:
    path = str(tmp_path / "null")
    Path(path).touch()
    before = devices((path,))
    assert devices((path,)) == before
    os.chmod(path, 0o600)
    assert devices((path,)) != before
