from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.governed import POLICY

Carrel = Callable[..., subprocess.CompletedProcess[bytes]]


@pytest.fixture
def people(carrel: Carrel) -> dict[str, dict[str, str]]:
    """Environments of an agent and of a person who may approve."""

    def token(name: str, kind: str, scope: str) -> dict[str, str]:
        made = carrel("token", "create", name, "--kind", kind, "--scope", scope)
        return {"CARREL_TOKEN": made.stdout.decode().strip()}

    return {"agent": token("coder", "agent", "operate"), "ann": token("ann", "person", "approve")}


@pytest.fixture
def context(carrel: Carrel, tmp_path: Path) -> Iterator[str]:
    name = f"cli-{uuid.uuid4().hex[:12]}"
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(POLICY))
    assert carrel("policy", "set", name, "--settings", str(file)).returncode == 0
    yield name
    carrel("rm", "--files", "--yes", name)


def waits(carrel: Carrel, context: str, *words: str) -> str:
    found = json.loads(carrel("approvals", "--json", "--context", context, *words).stdout)
    return str(found[0]["id"])


def test_a_refusal_says_how_to_go_on(carrel: Carrel, people: dict[str, dict[str, str]], context: str) -> None:
    asked = ["--cwd", "data", "--env", "A=b c", context, "--", "touch", "a b"]
    refused = carrel("exec", *asked, env=people["agent"])
    first, second = refused.stderr.decode().splitlines()[-2:]  # the first line tells of the new sandbox
    handle = waits(carrel, context)
    assert refused.returncode == 1 and first.startswith("error: a person has to decide")
    again = shlex.join(["carrel", "exec", "--approval", handle, *asked])
    assert second == f"hint: another person allows it with `carrel approve {handle}`; then `{again}`"

    shown = carrel("approvals", env=people["ann"]).stdout.decode()
    assert handle in shown and "agent:coder" in shown and "touch 'a b' (with cwd, env)" in shown
    mine = carrel("approve", handle, env=people["agent"])
    assert mine.returncode == 1 and b"agents may not" in mine.stderr
    done = carrel("approve", handle, "apr-0", "-m", "fine", env=people["ann"])
    assert done.returncode == 1 and done.stdout.decode().startswith(f"approved {handle} touch 'a b' (with cwd, env)")
    assert b"error: apr-0: there is no approval" in done.stderr
    words = shlex.split(again)[1:]
    assert carrel(*words, env=people["agent"]).returncode == 0
    used = carrel(*words, env=people["agent"])
    assert used.returncode == 1 and b"used already" in used.stderr
    assert carrel("approvals", "--context", context).stderr == b"no operation waits for approval\n"
    assert waits(carrel, context, "--all") == handle


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        (["python", "-c", "print(6 * 7)", "CONTEXT"], b"42\n"),
        (["python", "--cell", "a", "-c", "6 * 7", "CONTEXT"], b"42\n"),
        (["sh", "-c", "uname", "CONTEXT"], b"Linux\r\n"),
    ],
)
def test_what_was_approved_runs_once_by_every_command(
    carrel: Carrel, people: dict[str, dict[str, str]], context: str, asked: list[str], shown: bytes
) -> None:
    asked = [context if word == "CONTEXT" else word for word in asked]
    refused = carrel(*asked, env=people["agent"])
    handle = waits(carrel, context)
    told = f"hint: another person allows it with `carrel approve {handle}`; then repeat this command with `--approval {handle}`"
    assert refused.stderr.decode().splitlines()[-1] == told
    assert carrel("approve", handle, env=people["ann"]).returncode == 0
    again = [asked[0], "--approval", handle, *asked[1:]]
    done = carrel(*again, env=people["agent"])
    assert (done.stdout, done.returncode) == (shown, 0), done.stderr
    used = carrel(*again, env=people["agent"])
    assert used.returncode == 1 and b"used already" in used.stderr


def test_a_command_that_takes_no_approval_says_what_helps(
    carrel: Carrel, people: dict[str, dict[str, str]], context: str
) -> None:
    assert carrel("exec", context, "echo", env=people["agent"]).returncode == 0
    assert b"output/" in carrel("ls", "--wait", "1", context, env=people["agent"]).stdout
    refused = carrel("mcp-servers", "add", context, "x", "--", "uname", env=people["agent"])
    handle = waits(carrel, context)
    assert f"`carrel approve --for-context {handle}`; then retry" in refused.stderr.decode()


def test_nothing_of_what_is_asked_for_hides(carrel: Carrel, people: dict[str, dict[str, str]], context: str) -> None:
    command = "touch x # \x1b[8m\u202e\nrm -rf " + "y" * 600 + " last"
    carrel("exec", context, "--", command, env=people["agent"])
    handle = waits(carrel, context)
    whole = f"`carrel approvals show {handle}`"
    left = len(r"touch x # \x1b[8m\u202e ⏎ rm -rf ") + 600 + len(" last") - 500
    for words in ([], ["--all"]):
        line = carrel("approvals", "--context", context, *words, env=people["ann"]).stdout.decode()
        assert r"touch x # \x1b[8m\u202e ⏎ rm -rf yyy" in line and "last" not in line
        assert f"[…] and {left} characters more; see {whole}" in line
    shown = carrel("approvals", "show", handle, env=people["ann"]).stdout.decode()
    assert "\x1b" not in shown and "\u202e" not in shown
    assert r"command: touch x # \x1b[8m\u202e" in shown and "y last\n" in shown
    assert json.loads(carrel("approvals", "show", handle, "--json").stdout)["arguments"]["command"] == command
    absent = carrel("approvals", "show", "apr-0")
    assert absent.returncode == 1 and b"there is no approval" in absent.stderr


def test_who_asked_is_told_who_decides(carrel: Carrel, context: str) -> None:
    carrel("exec", context, "--", "touch", "x")
    own = carrel("approve", waits(carrel, context))
    assert own.returncode == 1 and b"nobody decides their own request" in own.stderr
    assert b"a token of its own" in own.stderr


def test_deny_rule_and_context(carrel: Carrel, people: dict[str, dict[str, str]], context: str) -> None:
    carrel("exec", context, "--", "id", env=people["agent"])
    handle = waits(carrel, context)
    assert carrel("deny", handle, "-m", "ask me first", env=people["ann"]).stdout.startswith(b"denied")
    told = carrel("exec", "--approval", handle, context, "--", "id", env=people["agent"])
    assert told.returncode == 1 and b"ask me first" in told.stderr
    carrel("exec", context, "--", "id", env=people["agent"])
    both = carrel("approve", waits(carrel, context), "--for-context", "--rule", "shell(id:*)", env=people["ann"])
    assert both.returncode == 2
    done = carrel("approve", waits(carrel, context), "--rule", "shell(id:*)", "--json", env=people["ann"])
    assert json.loads(done.stdout)["decided"][0]["rule"] == "shell(id:*)"
    assert carrel("exec", context, "--", "id", "-u", env=people["agent"]).returncode == 0
    carrel("exec", context, "--", "uname", env=people["agent"])
    assert carrel("approve", waits(carrel, context), "--for-context", env=people["ann"]).returncode == 0
    for _ in range(2):
        assert carrel("exec", context, "--", "uname", env=people["agent"]).stdout == b"Linux\n"


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_watching_and_waiting(
    carrel: Carrel, data_dir: Path, people: dict[str, dict[str, str]], context: str, words: list[str]
) -> None:
    environ = {**os.environ, "CARREL_DATA_DIR": str(data_dir), **people["ann"]}
    command = [sys.executable, "-m", "carrel", "approvals", "--watch", "--context", context, *words]
    watching = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE)
    run = [sys.executable, "-m", "carrel", "exec", "--wait", "60", context, "--", "uname"]
    waiting = subprocess.Popen(
        run, env={**environ, **people["agent"]}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    assert watching.stdout is not None
    try:
        line = watching.stdout.readline()
        handle = waits(carrel, context)
        assert handle.encode() in line
        if words:
            assert json.loads(line)["state"] == "pending"
        assert carrel("approve", handle, env=people["ann"]).returncode == 0
        assert b"approved" in watching.stdout.readline()
        assert waiting.communicate(timeout=60)[0] == b"Linux\n" and waiting.returncode == 0
        watching.send_signal(signal.SIGINT)
        assert watching.wait(30) == 130
    finally:
        for process in (watching, waiting):
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def test_a_watch_that_ends_with_the_server_says_so(tmp_path: Path) -> None:
    """It ended in silence, as if there was nothing more to come."""
    environ = {**os.environ, "CARREL_DATA_DIR": str(tmp_path / "d")}
    base, file = [sys.executable, "-m", "carrel"], tmp_path / "settings.json"
    file.write_text(json.dumps(POLICY))
    with subprocess.Popen([*base, "serve", "--port", "0"], env=environ, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None and b"listens on" in server.stdout.readline()
            for words in (["policy", "set", "watched", "--settings", str(file)], ["exec", "watched", "uname"]):
                subprocess.run([*base, *words], env=environ, capture_output=True, check=False)
            run = [*base, "approvals", "--watch"]
            with subprocess.Popen(run, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as watching:
                assert watching.stdout is not None and b"uname" in watching.stdout.readline()
                server.send_signal(signal.SIGTERM)
                assert server.wait(60) == 0
                told = watching.communicate(timeout=60)[1]
            assert watching.returncode == 1 and b"error: the server stopped" in told
        finally:
            server.kill()


def test_approve_without_an_id_needs_a_terminal(carrel: Carrel) -> None:
    for words in (["approve"], ["deny"], ["approve", "--json"]):
        done = carrel(*words)
        assert done.returncode == 2 and b"carrel approvals" in done.stderr


def test_who_asked_is_told_how_to_ask_as_an_agent(carrel: Carrel, context: str, data_dir: Path) -> None:
    asked = [context, "--", "touch", "a"]
    assert carrel("exec", *asked).returncode == 1
    own = carrel("approve", waits(carrel, context))
    assert own.returncode == 1 and b"own request" in own.stderr and b"agent-token" in own.stderr
    agent = {"CARREL_TOKEN": (data_dir / "agent-token").read_text()}
    assert carrel("exec", *asked, env=agent).returncode == 1
    assert carrel("approve", waits(carrel, context)).returncode == 0
