from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

Carrel = Callable[..., subprocess.CompletedProcess[bytes]]


@pytest.fixture
def context(carrel: Carrel) -> str:
    return f"cli-{uuid.uuid4().hex[:12]}"


def test_run_passes_streams_and_exit_code(carrel: Carrel) -> None:
    done = carrel("run", "--", "sh", "-c", "printf out; printf err >&2; exit 7")
    assert done.stdout == b"out"
    assert b"err" in done.stderr
    assert done.returncode == 7


def test_one_word_is_shell_text_and_options_after_it_belong_to_the_program(carrel: Carrel) -> None:
    assert carrel("run", "echo $((6 * 7)) | cat").stdout == b"42\n"
    assert carrel("run", "echo", "--json", "-h").stdout == b"--json -h\n"


def test_options_behind_the_context_are_told(carrel: Carrel, context: str) -> None:
    """They were run as a program: `--timeout: command not found`."""
    for words in (["exec", context, "--timeout", "5", "--", "true"], ["exec", context, "-C", "data", "true"]):
        done = carrel(*words)
        assert done.returncode == 2 and b"options come first" in done.stderr
    assert context not in carrel("ps").stdout.decode()


def test_run_gives_the_environment_it_is_told(carrel: Carrel) -> None:
    done = carrel("run", "-e", "A=1=2", "-e", "PASSED", "--", "sh", "-c", "echo $A $PASSED", env={"PASSED": "on"})
    assert done.stdout == b"1=2 on\n"


def test_run_feeds_standard_input(carrel: Carrel) -> None:
    data = os.urandom(3 * 1024 * 1024)
    done = carrel("run", "--", "cat", stdin=data)
    assert done.stdout == data
    assert carrel("run", "--", "true", stdin=data).returncode == 0


def test_json_has_the_output_and_how_it_ended(carrel: Carrel, alone: Carrel) -> None:
    for command in (carrel, alone):
        done = command("run", "--json", "printf out; printf err >&2; exit 7")
        told = json.loads(done.stdout)
        assert (told["stdout"], told["stderr"], told["exit_code"], told["timed_out"]) == ("out", "err", 7, False)
        assert (done.stderr, done.returncode) == (b"", 7)


def test_signals_and_deadlines_have_their_codes(carrel: Carrel) -> None:
    assert carrel("run", "kill -TERM $$").returncode == 128 + signal.SIGTERM
    for refused in ("nan", "-1"):
        done = carrel("run", f"--timeout={refused}", "true")
        assert done.returncode != 0 and b"means no " in done.stderr, done.stderr
        assert b"Traceback" not in done.stderr
    done = carrel("run", "--timeout", "0.5", "echo before; sleep 60")
    assert done.returncode == 124
    assert done.stdout == b"before\n"
    assert b"timed out" in done.stderr


def test_nothing_is_left_on_the_server(carrel: Carrel) -> None:
    before = {each["id"] for each in json.loads(carrel("ps", "--json").stdout)}
    carrel("run", "true")
    carrel("run", "--provider", "nowhere", "true")
    assert {each["id"] for each in json.loads(carrel("ps", "--json").stdout)} <= before


def test_an_interrupted_run_leaves_nothing(carrel: Carrel, data_dir: Path) -> None:
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        before = {each["id"] for each in json.loads(carrel("ps", "--json").stdout)}
        process = subprocess.Popen(
            [sys.executable, "-m", "carrel", "run", "echo started; exec sleep 60"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "CARREL_DATA_DIR": str(data_dir)},
        )
        with process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == b"started\n"
            process.send_signal(number)
            assert process.wait(60) == code
            assert b"Traceback" not in process.stderr.read()
        assert {each["id"] for each in json.loads(carrel("ps", "--json").stdout)} <= before


def test_a_reader_that_leaves_is_no_error(carrel: Carrel, data_dir: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "carrel", "run", "--timeout", "20", "yes"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "CARREL_DATA_DIR": str(data_dir)},
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(4) == b"y\ny\n"
        process.stdout.close()
        assert process.wait(60) == 1
        assert b"rror" not in process.stderr.read()


def test_run_needs_no_server_and_leaves_nothing(alone: Carrel, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as scratch:
        done = alone("run", "--", "sh", "-c", "echo hello; exit 3", env={"TMPDIR": scratch})
        assert (done.stdout, done.stderr, done.returncode) == (b"hello\n", b"", 3)
        assert list(Path(scratch).iterdir()) == []
    assert not (tmp_path / "nothing").exists()


def test_run_without_a_server_copes_with_a_long_temporary_path(alone: Carrel, tmp_path: Path) -> None:
    scratch = tmp_path / ("x" * 100)
    scratch.mkdir()
    assert alone("run", "echo hello", env={"TMPDIR": str(scratch)}).stdout == b"hello\n"
    failed = alone("run", "--provider", "nowhere", "true")
    assert failed.returncode == 1
    assert [line.split(b":")[0] for line in failed.stderr.splitlines()] == [b"error", b"hint"]


def test_run_falls_back_when_the_server_is_gone_but_not_when_it_was_named(alone: Carrel, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing/server.json").write_text('{"url": "http://127.0.0.1:9", "pid": 1}')
    assert alone("run", "echo here").stdout == b"here\n"
    done = alone("run", "true", env={"CARREL_URL": "http://127.0.0.1:9"})
    assert done.returncode == 1
    assert b"no carrel server answers at http://127.0.0.1:9" in done.stderr
    assert b"hint: " in done.stderr


def test_keep_needs_a_server_and_keeps(carrel: Carrel, alone: Carrel) -> None:
    refused = alone("run", "--keep", "true")
    assert refused.returncode == 1
    assert b"carrel serve" in refused.stderr
    done = carrel("run", "--keep", "echo kept > f")
    kept = done.stderr.split(b"kept as ")[1].split(b";")[0].decode()
    assert carrel("exec", kept, "cat f").stdout == b"kept\n"
    assert carrel("rm", "-y", kept).returncode == 0


def test_the_unsafe_provider_is_labelled(carrel: Carrel) -> None:
    done = carrel("run", "--provider", "process", "--trust", "high", "true")
    assert done.returncode == 0, done.stderr
    assert b"UNSAFE" in done.stderr


def test_exec_keeps_the_workspace_and_logs_tell(carrel: Carrel, context: str) -> None:
    try:
        assert carrel("exec", context, "--", "sh", "-c", "echo data > file; echo said; exit 9").returncode == 9
        assert carrel("exec", "--cwd", ".", context, "cat file; echo oops >&2").stdout == b"data\n"
        newest = carrel("logs", context)
        assert (newest.stdout, newest.stderr) == (b"data\n", b"oops\n")
        commands = json.loads(carrel("ps", context, "--json").stdout)
        assert [each["exit_code"] for each in commands] == [9, 0]
        assert carrel("logs", context, commands[0]["id"]).stdout == b"said\n"
        assert carrel("logs", context, commands[0]["id"], "-f", "--offset", "2").stdout == b"id\n"
        shown = json.loads(carrel("logs", context, "--json").stdout)
        assert (shown["stdout"], shown["stderr"], shown["info"]["exit_code"]) == ("data\n", "oops\n", 0)
        assert b"exit 9" in carrel("ps", context).stdout
    finally:
        carrel("rm", "--yes", context)


def test_a_wrong_call_makes_no_sandbox(carrel: Carrel, context: str) -> None:
    assert carrel("exec", context, "--").returncode == 2
    assert carrel("ps", context).stderr.startswith(b"error: no sandbox named")


def test_what_an_output_cannot_show_is_shown_as_its_code(carrel: Carrel, context: str) -> None:
    try:
        carrel("exec", context, "touch grüße")
        done = carrel("ls", context, env={"PYTHONIOENCODING": "ascii"})
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"gr\\xfc\\xdfe" in done.stdout
    finally:
        carrel("rm", "--yes", "--files", context)


def test_logs_of_nothing(carrel: Carrel) -> None:
    done = carrel("logs", "no-such-context")
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: no sandbox named 'no-such-context'\nhint: ")


def started(directory: Path, *words: str) -> subprocess.Popen[bytes]:
    """A command whose process is in the background of this test, with its first line read: it runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "carrel", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "CARREL_DATA_DIR": str(directory)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    return process


CATCHES = "trap 'echo caught; exit 5' INT; echo started; while :; do sleep 0.05; done"
IGNORES = "trap 'echo again' INT; echo started; while :; do sleep 0.05; done"


@pytest.mark.parametrize("server", [True, False])
def test_ctrl_c_interrupts_the_command_and_the_second_kills_it(server: bool, data_dir: Path, tmp_path: Path) -> None:
    directory = data_dir if server else tmp_path / "nothing"
    with started(directory, "run", CATCHES) as process:
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == (b"caught\n", b"")
        assert process.returncode == 5
    with started(directory, "run", IGNORES) as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == b"again\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGKILL
    with started(directory, "run", "echo started; exec sleep 60") as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


def test_what_makes_a_sandbox_says_so_and_takes_its_options(carrel: Carrel, context: str, tmp_path: Path) -> None:
    made = f"carrel: created a sandbox for '{context}'; there was none\n".encode()
    try:
        first = carrel("exec", "--memory", "200m", "--network", "none", context, "echo out")
        assert (first.stdout, first.stderr) == (b"out\n", made)
        again = carrel("exec", "--memory", "200m", context, "true")
        assert (again.returncode, again.stderr) == (0, b"")
        other = carrel("exec", "--memory", "300m", context, "true")
        assert other.returncode == 1 and b"runs with limits.memory_mb = 200" in other.stderr
        carrel("rm", "--yes", "--files", context)
        (tmp_path / "f").write_text("x")
        copied = carrel("cp", "--disk", "7m", str(tmp_path / "f"), f"{context}:f")
        assert (copied.returncode, copied.stderr) == (0, made)
        [info] = [each for each in json.loads(carrel("ps", "--json").stdout) if each["context_id"] == context]
        assert info["limits"]["disk_mb"] == 7
    finally:
        carrel("rm", "--yes", "--files", context)
