from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

import carrel as package
from carrel.cli import main
from carrel.cli.app import build, called

Carrel = Callable[..., subprocess.CompletedProcess[bytes]]
COMMANDS = sorted([*(str(each.name) for each in build().registered_commands), "approvals"])


def test_the_commands_are_these() -> None:
    expected = [
        "agent",
        "approvals",
        "approve",
        "bundle",
        "cp",
        "deny",
        "diff",
        "doctor",
        "download",
        "events",
        "exec",
        "forget",
        "fork",
        "here",
        "log",
        "logs",
        "ls",
        "mcp",
        "port",
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
        "undo",
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
    assert alone("--version").stdout.decode() == f"carrel {package.__version__}\n"
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


BUFFERED = {key: value for key, value in os.environ.items() if not key.startswith(("CARREL_", "PYTHONUNBUFFERED"))}


@pytest.mark.parametrize("words", [["version"], ["version", "--json"], ["--version"], ["--help"], ["ps", "--help"], []])
def test_full_standard_output_is_an_error(tmp_path: Path, words: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "carrel", *words], env=BUFFERED, stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode == 1
    assert done.stderr == b"error: cannot write to standard output: No space left on device\n"


@pytest.mark.parametrize("word", ["run", "exec"])
def test_full_standard_output_ends_a_command(data_dir: Path, word: str) -> None:
    words = ["run", "--"] if word == "run" else ["exec", "full", "--"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "carrel", *words, "sh", "-c", "echo a; exec sleep 1000"],
            env={**BUFFERED, "CARREL_DATA_DIR": str(data_dir)},
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.endswith(b"error: cannot write to standard output: No space left on device\n")


@pytest.mark.parametrize(("words", "code"), [(["version"], 0), (["nonsense"], 2), (["ps"], 1)])
@pytest.mark.parametrize("broken", ["full", "nobody reads"])
def test_exit_code_stays_when_standard_error_takes_nothing(
    tmp_path: Path, words: list[str], code: int, broken: str
) -> None:
    if broken == "full":
        errors = os.open("/dev/full", os.O_WRONLY)
    else:
        reading, errors = os.pipe()
        os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "carrel", *words],
            env={**BUFFERED, "CARREL_DATA_DIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=errors,
            check=False,
        )
    finally:
        os.close(errors)
    assert done.returncode == code


def test_colour_only_at_a_terminal() -> None:
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    subprocess.run([sys.executable, "-m", "carrel", "--help"], stdout=slave, env=environment, check=True)
    os.close(slave)
    assert b"\x1b[" in os.read(master, 65536)
    os.close(master)


@pytest.mark.parametrize("words", [[], ["secret"], ["egress"]])
def test_without_a_command_help_is_all_that_is_shown(alone: Carrel, words: list[str]) -> None:
    done = alone(*words)
    assert done.returncode == 2
    assert b"Usage: carrel" in done.stdout and done.stderr == b""


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_stream_that_was_closed_is_nowhere(alone: Carrel, data_dir: Path, closed: int) -> None:
    shell = f'exec "$0" -m carrel "$@" {closed}{"<" if closed == 0 else ">"}&-'
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {**os.environ, "CARREL_DATA_DIR": str(data_dir)}
    for words, code in ((["ps"], 0), (["run", "--", "sh", "-c", "cat; echo a; echo b >&2; exit 3"], 3), (["no"], 2)):
        done = subprocess.run(["sh", "-c", shell, sys.executable, *words], env=environment, check=False, **streams)
        assert done.returncode == code, done.stderr
        assert b"failed" not in done.stderr


def test_one_command_is_as_it_is_among_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert called(["ps", "--help"]) == called(["--trace", "ps"]) == "ps"
    assert [called(words) for words in ([], ["--help", "ps"], ["pss"], ["--trace"])] == [None] * 4
    for name in ("ps", "exec", "policy"):
        shown = []
        for app in (build(), build(name)):
            assert app(args=[name, "--help"], prog_name="carrel", standalone_mode=False) == 0
            shown.append(capsys.readouterr().out)
        assert shown[0] == shown[1]


def test_help_names_arguments_once(alone: Carrel) -> None:
    assert b"carrel python [OPTIONS] [CONTEXT] [FILE] [ARGS]..." in alone("python", "--help").stdout
    assert b"carrel stop [OPTIONS] {CONTEXT}..." in alone("stop", "--help").stdout


def test_light_commands_import_nothing_heavy() -> None:
    heavy = "'httpx', 'rich', 'asyncio', 'fastapi'"
    code = f"import sys, carrel.cli.app; carrel.cli.app.build('ps'); print(*[m for m in ({heavy}) if m in sys.modules])"
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
    assert {name[1] for name in names if name[0] == "carrel" and name[1:]} == {
        "cli",
        "client",
        "errors",
        "extras",
        "models",
        "primitives",
    }


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


NO_JSON = {"serve", "agent", "mcp", "sh", "audit export"}
"""What runs until it is ended, is a terminal, or writes a file of its own form."""


def commands(group: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, object]]:
    """Every command that does something, with its full name."""
    for name, each in getattr(group, "commands", {}).items():
        if getattr(each, "commands", None):
            yield from commands(each, (*path, name))
        else:
            yield " ".join((*path, name)), each


def test_every_command_prints_json() -> None:
    found = dict(commands(typer.main.get_command(build())))
    assert len(found) > 40
    without = {name for name, each in found.items() if not any("--json" in option.opts for option in each.params)}
    assert without == NO_JSON
