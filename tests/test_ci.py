"""What continuous integration runs its tests in: a clean environment, and a user that it makes and removes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.support.servers import as_user

ROOT = Path(__file__).parent.parent
CLEAN = str(ROOT / "scripts" / "clean-environment")


def variables(**given: str) -> dict[str, str]:
    """The environment that a command has in the clean environment when these variables were set outside."""
    path = {"PATH": os.environ["PATH"]}
    said = subprocess.run([CLEAN, "env", "-0"], env=path | given, capture_output=True, text=True, check=True)
    return dict(line.split("=", 1) for line in said.stdout.split("\0") if line)


def test_clean_environment_keeps_only_what_is_named() -> None:
    kept = {"HOME": "/h", "LANG": "C.UTF-8", "LC_ALL": "C", "CI": "true", "TERM": "dumb", "TMPDIR": "/t"}
    kept |= {"PIP_INDEX_URL": "https://python-index.example/simple", "UV_OFFLINE": "1", "https_proxy": "http://p:1"}
    kept |= {"HTTPS_PROXY": "http://p:1", "NO_PROXY": "a, b\nc", "SSL_CERT_FILE": "/c", "npm_config_registry": "r"}
    dropped = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": "/x", "PYTHONDONTWRITEBYTECODE": "1", "CARREL_PORT": "1"}
    dropped |= {"COLUMNS": "9", "OTHER": "x", "VIRTUAL_ENV": "/v"}
    found = variables(**kept, **dropped)
    assert kept.items() <= found.items()
    assert not dropped.keys() & found.keys()


def test_clean_environment_gives_the_exit_code_of_its_command() -> None:
    done = subprocess.run([CLEAN, "sh", "-c", "exit 7"], check=False)
    assert done.returncode == 7


def test_ci_runs_everything_in_the_clean_environment() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert 'run() { scripts/clean-environment "$@"; }' in lines
    commands = [line.strip() for line in lines if "make " in line or "scripts/test-as-user" in line]
    assert len(commands) == 3 and all(line.startswith("run ") for line in commands)


def test_only_root_can_run_tests_as_another_user(tmp_path: Path) -> None:
    place = tmp_path / "scripts"
    place.mkdir()
    script = shutil.copy(ROOT / "scripts" / "test-as-user", place)
    for path in (*list(tmp_path.parents)[:2], tmp_path, place):
        path.chmod(path.stat().st_mode | 0o055)
    done = subprocess.run(as_user([script, "tests/none"]), capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "only root" in done.stderr
