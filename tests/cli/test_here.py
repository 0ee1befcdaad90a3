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
from tests.support.here_ground import COMMAND, WAIT_S, Screen, ended, here, sharing

from carrel.cli.here.run import context_id


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory, carrel_forks: None) -> Iterator[dict[str, str]]:
    """A server that all tests here share."""
    base = tmp_path_factory.mktemp("here")
    with sharing(base, 'unknown_hosts = "ask"\n', CARREL_APPROVALS_TTL_S="10") as found:
        yield found


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
    screen.type(b"a")  # it may have been typed before the question was seen
    screen.answer(b"\x1b]11;rgb:aaaa/aaaa/aaaa\x07")  # a terminal sends this when a program asks for its colour
    screen.type(b"a")
    screen.answer(b"d")
    screen.wait(b"hello")  # vim draws its screen again
    screen.type(b":wq\r")
    assert screen.end() == 0
    assert (folder / "notes.txt").read_text() == "hello\n"
    assert re.search(rb"files added; .*0 approved, 1 denied", screen.seen), screen.seen


CURSES = """
import curses

def main(screen):
    curses.raw()
    curses.mousemask(curses.ALL_MOUSE_EVENTS)
    told = "ready"
    while told != "key q":
        screen.clear()  # else only the characters that differ are drawn
        screen.addstr(2, 3, f"[{told}]")
        key = screen.getch()
        if key == curses.KEY_MOUSE:
            told = "mouse %d %d" % curses.getmouse()[1:3]
        elif key == curses.KEY_RESIZE:
            told = "size %d %d" % screen.getmaxyx()
        else:
            told = f"key {curses.keyname(key).decode()}"

curses.wrapper(main)
"""


def test_screen_program_gets_keys_mouse_and_sizes(env: dict[str, str], folder: Path) -> None:
    screen = Screen([*COMMAND, "--", "python3", "-c", CURSES], env, folder)
    modes = screen.wait(b"ready")
    assert b"\x1b[?1049h" in modes and b"\x1b[?1000h" in modes.replace(b"1006;", b"")
    click = b"\x1b[<0;5;4M" if b"1006" in modes else b"\x1b[M %$"
    for typed, told in ((b"\x1bOA", b"KEY_UP"), (b"\x03", b"^C"), (b"\xc3", b"M-C"), (click, b"mouse 4 3")):
        screen.type(typed)
        screen.wait(told)
    screen.resize(30, 90)
    screen.wait(b"size 30 90")
    screen.type(b"q")
    assert screen.end() == 0
    assert b"\x1b[?1049l" in screen.seen and b"\x1b[?1000l" in screen.seen.replace(b"1006;", b"")


def test_question_that_nobody_answers_means_no(env: dict[str, str], folder: Path, tmp_path: Path) -> None:
    program = tmp_path / "notify-send"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> {tmp_path}/notified\n')
    program.chmod(0o755)
    desktop = {**env, "DISPLAY": ":0", "PATH": f"{tmp_path}:{env['PATH']}"}
    ask = ["--", "sh", "-c", "curl -s http://unknown.example/; read line"]
    screen = Screen([*COMMAND, *ask], desktop, folder)
    assert b"unknown.example" in screen.wait(b"[d] deny")
    # At a terminal without questions, a line names the command for another terminal.
    other = Screen([*COMMAND, "--no-questions", "--name", "other", *ask], env, folder)
    other.wait(f"other contexts work in this folder now: '{context_id(str(folder), 'sh')}'".encode())
    other.wait(b"the program waits for an answer: connect unknown.example 80; `")
    assert b"carrel approve apr-" in other.wait(b"`")
    assert b"the same agent runs in this folder already" in here(env, folder, "--", "sh", "-c", "true").stderr
    for each in (screen, other):
        each.wait(b"it was not decided, or not used, in time")
        each.type(b"\r")
        assert each.end() == 0
    assert b"0 approved, 1 denied" in screen.seen
    assert (tmp_path / "notified").read_text() == "--app-name=carrel -- carrel here asks connect unknown.example 80\n"


@pytest.mark.parametrize("how", ["signal", "terminal"])
def test_command_that_ends_during_a_question_ends_the_program(env: dict[str, str], folder: Path, how: str) -> None:
    trap = "trap '' HUP; " if how == "terminal" else ""
    script = f"{trap}curl -s http://{how}.example/ & while :; do date +%N > beat; sleep 0.02; done"
    screen = Screen([*COMMAND, "--", "sh", "-c", script], env, folder)
    screen.wait(b"[d] deny")
    if how == "signal":
        os.kill(screen.pid, signal.SIGTERM)
        assert screen.end() == 128 + signal.SIGTERM
        assert b"\x1b[?1049l" in screen.seen  # the screen of the shell is shown again
    else:
        os.close(screen.fd)
        os.waitpid(screen.pid, 0)
    last = (folder / "beat").read_text()
    time.sleep(0.1)  # longer than the program needs for the next one
    assert (folder / "beat").read_text() == last


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
