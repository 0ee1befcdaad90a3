"""`make serve` and `scripts/setup` in a fresh copy of the checkout."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COPIED = ["LICENSE", "Makefile", "README.md", "pyproject.toml", "requirements", "scripts", "src"]


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Path]:
    """What a clone has and setup needs, without `.venv`."""
    directory = tmp_path / "clone"
    directory.mkdir()
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, directory)
    yield directory
    shutil.rmtree(directory)


def clean() -> dict[str, str]:
    return {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("CARREL_", "PYTHON", "VIRTUAL_ENV", "MAKE", "MFLAGS"))
    }


def setup(clone: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [clone / "scripts" / "setup", *words], env=clean(), capture_output=True, text=True, check=False, timeout=240
    )


def stamp(clone: Path, kind: str) -> str:
    content = (clone / "requirements" / f"{kind}.txt").read_bytes() + (clone / "pyproject.toml").read_bytes()
    return f"{kind} {hashlib.sha256(content).hexdigest()} {clone}"


def test_make_serve_installs_the_server_alone_and_shows_its_steps(clone: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    log = tmp_path / "log"
    command = ["make", "serve", f"ARGS=--port 0 --data-dir {data}"]
    with log.open("wb") as said:
        make = subprocess.Popen(command, cwd=clone, env=clean(), stdout=said, stderr=said, start_new_session=True)
    try:
        deadline = time.monotonic() + 240
        while not (data / "server.json").exists():
            assert make.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
    finally:
        os.killpg(make.pid, signal.SIGINT)
        try:
            make.wait(30)
        finally:
            if make.poll() is None:
                os.killpg(make.pid, signal.SIGKILL)
                make.wait()
    lines = log.read_text().splitlines()
    steps = [line for line in lines if line.startswith("setup: ") and "/4 " in line]
    assert [step[7] for step in steps][-2:] == ["3", "4"] and steps[0][7] == "1", lines
    assert sum(line.startswith("setup:   ") and line.endswith(" s") for line in lines) == len(steps)
    assert any(" listens on http://127.0.0.1:" in line for line in lines)
    assert not any("warning" in line.lower() for line in lines), lines
    installed = {path.name for path in (clone / ".venv" / "lib").glob("python3*/site-packages/*")}
    assert {"uvicorn", "fastapi", "uv", "pip"} <= installed
    assert not {"pytest", "mypy", "ruff", "langgraph", "deepagents"} & installed
    assert (clone / ".venv" / ".carrel-setup").read_text() == stamp(clone, "server")
    again = setup(clone, "server")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")


@pytest.mark.parametrize(("there", "wanted"), [("dev", "dev"), ("dev", "server"), ("server", "server")])
def test_setup_does_nothing_when_what_is_wanted_is_there(clone: Path, there: str, wanted: str) -> None:
    (clone / ".venv").mkdir()
    (clone / ".venv" / ".carrel-setup").write_text(stamp(clone, there))
    done = setup(clone, wanted)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert os.listdir(clone / ".venv") == [".carrel-setup"]


def test_setup_refuses_an_unknown_kind(clone: Path) -> None:
    done = setup(clone, "sever")
    assert done.returncode == 2 and "'sever' is neither" in done.stderr


@pytest.mark.parametrize("kind", ["dev", "server"])
def test_requirements_are_hashed_and_name_no_index(kind: str) -> None:
    text = (ROOT / "requirements" / f"{kind}.txt").read_text()
    assert not [line for line in text.splitlines() if line.startswith("-") or "://" in line]
    pins = text.replace("\\\n", " ").splitlines()
    assert len(pins) > 40 and all("==" in pin and "--hash=sha256:" in pin for pin in pins)
