from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import carrel as package
from carrel.cli import main
from carrel.cli.app import app

Carrel = Callable[..., subprocess.CompletedProcess[bytes]]
COMMANDS = sorted([*(str(each.name) for each in app.registered_commands), "approvals"])


def test_the_commands_are_these() -> None:
    expected = [
        "agent",
        "approvals",
        "approve",
        "cp",
        "deny",
        "diff",
        "doctor",
        "download",
        "exec",
        "fork",
        "logs",
        "ls",
        "mcp",
        "ps",
        "python",
        "restore",
        "resume",
        "rm",
        "run",
        "serve",
        "sh",
        "snapshot",
        "snapshots",
        "stop",
        "sync",
        "templates",
        "usage",
        "version",
    ]
    assert expected == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_help_teaches_by_example(capsys: pytest.CaptureFixture[str], name: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.count(f"carrel {name}") >= 2


def test_version(alone: Carrel) -> None:
    assert alone("version").stdout.decode() == f"carrel {package.__version__}\n"
    assert json.loads(alone("version", "--json").stdout) == {"version": package.__version__}


@pytest.mark.parametrize(
    "words",
    [
        ["nonsense"],
        ["ps", "--nonsense"],
        ["run"],
        ["run", "--memory", "much", "true"],
        ["run", "--env", "=x", "true"],
        ["run", "--env", "SURELY_NOT_SET_HERE", "true"],
        ["run", "--timeout", "soon", "true"],
        ["serve", "--set", "novalue"],
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    told = capsys.readouterr()
    first, second = told.err.splitlines()
    assert first.startswith("error: ")
    assert second.startswith("hint: ")
    assert told.out == ""


@pytest.mark.parametrize("words", [["ps"], ["exec", "c", "true"], ["sh", "c"], ["ls", "c"], ["logs", "c"], ["rm", "c"]])
def test_without_a_server_two_lines_tell_how_to_start_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str]
) -> None:
    monkeypatch.delenv("CARREL_URL", raising=False)
    monkeypatch.setenv("CARREL_DATA_DIR", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: ")
    assert "carrel serve" in second


def test_a_full_device_is_told(alone: Carrel) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "carrel", "version"], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr


def test_colour_only_at_a_terminal() -> None:
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    subprocess.run([sys.executable, "-m", "carrel", "--help"], stdout=slave, env=environment, check=True)
    os.close(slave)
    assert b"\x1b[" in os.read(master, 65536)
    os.close(master)


def test_light_commands_import_nothing_heavy() -> None:
    heavy = "'httpx', 'rich', 'asyncio', 'fastapi'"
    code = f"import sys, carrel.cli.app; print(*[m for m in ({heavy}) if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == []


@pytest.mark.parametrize("words", [["ps"], ["usage"], ["resume", "absent"]])
def test_commands_that_ask_a_server_import_none_of_it(data_dir: Path, words: list[str]) -> None:
    """Only what a client needs: the rest takes longer to import than the command takes."""
    code = "import atexit, sys\nfrom carrel.cli import main\n"
    code += f"atexit.register(lambda: print(*sys.modules, file=sys.stderr))\nmain({words!r})\n"
    environment = {**os.environ, "CARREL_DATA_DIR": str(data_dir)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    names = [name.split(".") for name in done.stderr.splitlines()[-1].split()]
    others = {name[0] for name in names}
    assert {"httpcore", "pydantic"} <= others
    assert not {"fastapi", "sqlalchemy", "alembic", "uvicorn", "prometheus_client", "obstore"} & others
    assert {name[1] for name in names if name[0] == "carrel" and name[1:]} == {"cli", "client", "errors", "models"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    carrel = Path(sys.executable).with_name("carrel")
    script = subprocess.run(
        [carrel], env={**os.environ, "_CARREL_COMPLETE": f"source_{shell}"}, capture_output=True, check=True
    )
    assert f"complete_{shell}".encode() in script.stdout


def test_completion_knows_the_commands() -> None:
    asked = {"_CARREL_COMPLETE": "complete_bash", "COMP_WORDS": "carrel s", "COMP_CWORD": "1"}
    carrel = Path(sys.executable).with_name("carrel")
    done = subprocess.run([carrel], env={**os.environ, **asked}, capture_output=True, check=True)
    assert done.stdout.split() == [b"serve", b"sh", b"sync", b"stop", b"snapshot", b"snapshots", b"secret"]
