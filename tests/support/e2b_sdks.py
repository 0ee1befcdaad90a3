"""E2B's SDKs as published, in an environment and a folder of their own outside the clone, which all runs share."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.support.e2b_calls import JAVASCRIPT, PYTHON

SCRIPTS = Path(__file__).parent / "e2b"
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "carrel-tests"


def _folder(kind: str, packages: tuple[tuple[str, str], ...], make: list[list[str]]) -> Path:
    """Return a folder with these packages, which the commands make; it is kept for the next run."""
    versions = "-".join(version for _, version in packages)
    folder = _CACHE / f"e2b-{kind}-{versions}-{sys.version_info.major}.{sys.version_info.minor}"
    _CACHE.mkdir(parents=True, exist_ok=True)
    with open(_CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for command in make:
                done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
                if done.returncode:
                    pytest.skip(f"E2B's SDK cannot be installed: {done.stderr[-300:]}")
            (folder / "complete").touch()
    return folder


def python() -> Path:
    """Return a Python interpreter that has the SDKs and nothing else."""
    wanted = [f"{name}=={version}" for name, version in PYTHON]
    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", "venv/bin/python"]
    make = [[sys.executable, "-m", "uv", "venv", "--quiet", "--python", sys.executable, "venv"], [*install, *wanted]]
    return _folder("python", PYTHON, make) / "venv" / "bin" / "python"


def node(script: str) -> list[str]:
    """Return the command that runs a script with the SDKs of npm."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("this host has no Node.js")
    wanted = [f"{name}@{version}" for name, version in JAVASCRIPT]
    install = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", "."]
    folder = _folder("node", JAVASCRIPT, [[*install, *wanted]])
    copy = folder / f"{os.getpid()}-{script}"  # modules are found from where a script is
    shutil.copy(SCRIPTS / script, copy)
    return ["node", str(copy)]


def variables(url: str, token: str, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a program that uses an SDK."""
    kept = {name: value for name, value in os.environ.items() if name in {"PATH", "HOME", "LANG"}}
    return {**kept, "E2B_API_KEY": token, "E2B_API_URL": url, "E2B_SANDBOX_URL": url, **(more or {})}


def made(command: list[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a script to its end."""
    try:
        return subprocess.run(command, env=dict(environment), capture_output=True, text=True, timeout=200, check=False)
    finally:
        if command[0] == "node":
            os.unlink(command[1])
