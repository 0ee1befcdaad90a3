from __future__ import annotations

from pathlib import Path

import pytest

from carrel.providers.gvisor import runsc
from carrel.providers.gvisor.options import GvisorOptions
from carrel.providers.gvisor.provider import GvisorProvider


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_the_configured_program_is_taken_before_the_one_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert runsc.find("") is None
    mine, other = program(tmp_path / "mine", "true"), program(tmp_path / "runsc", "true")
    assert (runsc.find(mine), runsc.find("")) == (mine, other)
    assert runsc.find(str(tmp_path / "gone")) is None and runsc.find(str(tmp_path)) is None


def test_doctor_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    def missing(runsc: str, platform: str = "systrap") -> str | None:
        return GvisorProvider(str(tmp_path), options=GvisorOptions(runsc, platform), bundles="/none").missing()

    gone, broken = str(tmp_path / "gone"), program(tmp_path / "broken", "exit 1")
    old = program(tmp_path / "old", "test $# = 1 && echo runsc version release-20220905.0")
    good = program(tmp_path / "good", "echo runsc version 1")
    assert "no runsc on PATH; install gVisor, or build it with scripts/build-runsc" in str(missing(""))
    assert f"{gone} is not a program" in str(missing(gone))
    for user, path, words in (
        (0, broken, "does not run"),
        (0, old, "is too old (runsc version release-20220905.0)"),
        (1000, good, "as root"),
    ):
        monkeypatch.setattr("os.geteuid", lambda user=user: user)
        assert words in str(missing(path))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert missing(good) is None or "cgroup" in str(missing(good))
