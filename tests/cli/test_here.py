"""`carrel here`: a program on a folder, with the streams, the terminal and the signals of the caller."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.here_ground import COMMAND, WAIT_S, Screen, ended, here

from carrel.cli.here.server import server_for


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A server that all tests here share: this process is one of its users. Afterwards it ends."""
    base = tmp_path_factory.mktemp("here")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("CARREL_", "XDG_"))}
    given = {**kept, "CARREL_DATA_DIR": str(base / "data"), "XDG_CONFIG_HOME": str(base / "config"), "TERM": "xterm"}
    (base / "config/carrel").mkdir(parents=True)
    (base / "config/carrel/here.toml").write_text('unknown_hosts = "ask"\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CARREL_DATA_DIR", given["CARREL_DATA_DIR"])
        with server_for(str(base)):
            yield given
    ended(base / "data-here")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "project"
    found.mkdir()
    return found


def test_streams_exit_code_and_folder_pass_through(env: dict[str, str], folder: Path) -> None:
    (folder / "given.txt").write_text("given")
    script = "pwd; cat given.txt; printf new > made.txt; cat; printf err >&2; exit 7"
    done = here(env, folder, "--", "sh", "-c", script, stdin=b"piped")
    assert (done.stdout, done.returncode) == (f"{folder}\ngivenpiped".encode(), 7)
    assert b"err" in done.stderr
    made = folder / "made.txt"
    assert (made.read_text(), made.stat().st_uid) == ("new", os.getuid())
    missing = here(env, folder, "--", "no-such-program")
    assert missing.returncode == 127
    assert b"no-such-program: command not found" in missing.stderr
    killed = here(env, folder, "--", "sh", "-c", "kill -USR1 $$")
    assert killed.returncode == 128 + signal.SIGUSR1


def test_variables_that_may_be_secret_stay_outside(env: dict[str, str], folder: Path) -> None:
    given = {**env, "GITHUB_TOKEN": "hidden-value", "NAMED": "yes", "LC_TIME": "C"}
    done = here(given, folder, "--env", "NAMED", "--json", "--", "sh", "-c", "env; ls -A ..")
    lines = done.stdout.decode().splitlines()
    assert "NAMED=yes" in lines
    assert "LC_TIME=C" in lines
    assert lines[-1] == "project"  # nothing beside the folder is visible
    assert b"hidden-value" not in done.stdout
    told = json.loads(done.stderr.splitlines()[-1])
    assert (told["exit_code"], told["hosts_reached"]) == (0, [])


def test_home_of_an_agent_is_kept(env: dict[str, str], folder: Path) -> None:
    assert here(env, folder, "--name", "one", "--", "sh", "-c", "echo kept > ~/history").returncode == 0
    assert here(env, folder, "--name", "one", "--", "cat", "/home/agent/history").stdout == b"kept\n"
    assert here(env, folder, "--name", "two", "--", "cat", "/home/agent/history").returncode == 1
    assert list(folder.iterdir()) == []


def test_signals_reach_the_program(env: dict[str, str], folder: Path) -> None:
    script = "trap 'echo usr1' USR1; trap 'echo term; exit 3' TERM; echo ready; while :; do sleep 0.05; done"
    process = subprocess.Popen(
        [*COMMAND, "--", "sh", "-c", script],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == b"usr1\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == b"term\n"
        assert process.wait(WAIT_S) == 3


def test_keys_of_the_terminal_stop_and_continue_the_program(env: dict[str, str], folder: Path) -> None:
    shell = Screen(["bash", "--norc", "--noprofile", "-i"], {**env, "PS1": "prompt$ "}, folder)
    shell.wait(b"prompt$ ")
    program = "trap 'echo size $(stty size)' WINCH; echo begun; while :; do read line && echo got $line; done"
    shell.type(" ".join([*COMMAND, "--", "sh", "-c", f'"{program}"'.replace("$", "\\$")]).encode() + b"\r")
    shell.wait(b"\rbegun")
    shell.type(b"one\r")
    shell.wait(b"got one")
    shell.type(b"\x1a")
    shell.wait(b"Stopped")
    shell.wait(b"prompt$ ")
    shell.type(b"stty -a\r")
    assert b" icanon" in shell.wait(b"prompt$ ")  # the modes of the terminal are those of the shell again
    shell.resize(30, 100)
    shell.type(b"fg\r")
    shell.type(b"two\r")
    shell.wait(b"got two")
    shell.resize(31, 101)
    shell.type(b"\r")
    shell.wait(b"size 31 101")
    shell.type(b"\x03")
    shell.wait(b"prompt$ ")
    shell.type(b"echo code $?\r")
    shell.wait(b"code 130\r")
    shell.type(b"exit\r")
    assert shell.end() == 0


def test_person_is_told_what_a_long_start_waits_for(env: dict[str, str], folder: Path) -> None:
    program = (
        "from carrel.cli.here import waiting; waiting.FIRST_S = 0.01\n"
        "with waiting.explained('recording'): input()\n"
        "print('done')"
    )
    screen = Screen([sys.executable, "-c", program], env, folder)
    screen.wait(b"carrel: recording (0 s)")
    screen.type(b"\r")
    screen.wait(b"\x1b[2K\rdone")  # the line is gone
    assert screen.end() == 0


def test_ten_megabytes_are_pasted_without_loss(env: dict[str, str], folder: Path) -> None:
    data = os.urandom(5 * 1024 * 1024).hex().encode()
    script = f"stty raw -echo; echo ready; head -c {len(data)} | sha256sum"
    screen = Screen([*COMMAND, "--", "sh", "-c", script], env, folder)
    screen.wait(b"ready")
    screen.type(data)
    screen.wait(hashlib.sha256(data).hexdigest().encode())
    assert screen.end() == 0


def test_full_screen_program_and_a_question_beside_it(env: dict[str, str], folder: Path) -> None:
    screen = Screen([*COMMAND, "--", "vim", "-u", "NONE", "notes.txt"], env, folder)
    screen.wait(b"\x1b[?1049h")
    screen.type(b"ihello\x1b:call system('curl -s http://unknown.example/ >out.txt 2>&1 &')\r")
    screen.wait(b"may the program do this?")
    asked = screen.wait(b"[d] deny")
    assert b"unknown.example" in asked
    screen.type(b"d")
    screen.wait(b"hello")  # vim draws its screen again
    screen.type(b":wq\r")
    assert screen.end() == 0
    assert (folder / "notes.txt").read_text() == "hello\n"
    assert re.search(rb"files added; .*0 approved, 1 denied", screen.seen), screen.seen


def test_killed_command_ends_its_program_and_its_server(env: dict[str, str], folder: Path, tmp_path: Path) -> None:
    own = {**env, "CARREL_DATA_DIR": str(tmp_path / "alone")}
    script = "trap '' HUP TERM; echo begun; while :; do date +%N > beat; sleep 0.02; done"

    def start() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [*COMMAND, "--", "sh", "-c", script], cwd=folder, env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        return process

    record = tmp_path / "alone-here/server.json"
    with start() as process:
        # A server that is killed is replaced by one that stops what it left.
        os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)
        assert process.wait(WAIT_S) == 1
        ended(tmp_path / "alone-here")
    with start() as process:
        process.kill()
        ended(tmp_path / "alone-here")
    last = (folder / "beat").read_text()
    time.sleep(0.1)  # longer than the program needs for the next one
    assert (folder / "beat").read_text() == last
    assert not record.exists()


def test_summary_and_log_tell_what_was_refused(env: dict[str, str], folder: Path) -> None:
    strict = {**env, "XDG_CONFIG_HOME": str(folder.parent)}
    (folder / "old").touch()
    # A repository inside: if the agent adds it as a submodule, `git status` of the folder would run its monitor.
    plant = "mkdir -p sub/.git; echo '[core] fsmonitor=evil' > sub/.git/config"
    (folder / "job.sh").write_text(f"mkdir .vscode\n{plant}\ncurl -s http://refused.example/\n")
    done = here(strict, folder, "--json", "--", "sh", "-c", "rm old; sh job.sh; exit 4")
    told = json.loads(done.stderr.splitlines()[-1])
    assert (told["exit_code"], told["hosts_refused"]) == (4, ["refused.example"])
    assert told["held_back"] == {
        ".vscode": ".vscode.held-by-carrel",
        "sub/.git/config": "sub/.git/config.held-by-carrel",
    }
    assert (told["approved"], told["denied"]) == (0, 0)
    carrel = COMMAND[:-1]
    run = json.loads(here(strict, folder, "log", "--json", command=carrel).stdout)[0]
    # The program that the user typed was not approved by anybody, though its `rm` has to be.
    assert (run["commands"], run["approvals"], run["refused"]) == (1, 0, ["refused.example"])
