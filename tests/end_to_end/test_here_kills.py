"""`carrel here` and its server are killed at seeded moments. `CARREL_KILLS=200` kills more often."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from random import Random

import pytest
from tests.support.here_ground import COMMAND, WAIT_S, ended, until

from carrel.cli.here.runs import find_runs
from carrel.cli.here.server import client_for, server_for
from carrel.errors import NotFound

KILLS = 3
LONGEST_S = 1.5
"""Longer than a start takes, so that kills hit the start, the program and the end."""
VICTIMS = ("command", "server", "both")
SCRIPT = """
n=0
while [ $n -lt 300 ]; do
    n=$((n + 1)); echo $n > made/part; mv made/part made/$n; echo $n
    case $n in 5) rm -f given/removed;; 10) echo changed > given/kept;; 15) ln -s kept given/link;; esac
done
"""


@pytest.mark.parametrize("first", range(0, int(os.environ.get("CARREL_KILLS", KILLS)), KILLS))
def test_killed_at_any_moment(first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("CARREL_", "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CARREL_DATA_DIR", str(tmp_path / "data"))
    folder = tmp_path / "project"
    (folder / "made").mkdir(parents=True)
    (folder / "given").mkdir()
    for name in ("kept", "removed"):
        (folder / "given" / name).write_text(name)
    (folder / "agent.sh").write_text(SCRIPT)
    (tmp_path / "data-here").mkdir(mode=0o700)
    (tmp_path / "data-here/lock").touch()
    for seed in range(first, first + KILLS):
        _kill_once(seed, folder, tmp_path / "data-here")
    ended(tmp_path / "data-here")


def _kill_once(seed: int, folder: Path, data: Path) -> None:
    random, victim = Random(seed), VICTIMS[seed % 3]
    before, token = _files(folder), f"agent-{os.getpid()}-{seed}"
    known = _runs(folder)  # starts a server, which every other kill uses as it is
    if random.random() < 0.5:
        ended(data)
    process = subprocess.Popen(
        [*COMMAND, "--name", "agent", "--", "sh", "agent.sh", token],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    time.sleep(random.uniform(0, LONGEST_S))  # the moment of the kill
    if victim != "server":
        process.kill()
    if victim != "command" and (pid := _server(data)):
        os.kill(pid, signal.SIGKILL)
    said, told = process.communicate(timeout=WAIT_S)
    about = f"seed {seed}, {victim}: {told!r}"
    with server_for(str(folder)):
        again = subprocess.run(
            [*COMMAND, "--name", "agent", "--", "true"], cwd=folder, capture_output=True, check=False
        )
        assert again.returncode == 0, (about, again.stderr)
        assert not [pid for pid, words in _processes().items() if token in words], about
        numbers = said.decode().split("\n")[:-1]
        after = _files(folder)
        assert [after.get(f"made/{number}") for number in numbers] == [f"{number}\n" for number in numbers], about
        runs = [run for run in _runs(folder) if run not in known]
        assert len(runs) in (1, 2), about
        # The second command may have joined the sandbox of the first: then one run has the changes of both.
        with client_for(str(folder)) as client:
            context = find_runs(client, str(folder))[0].start.context_id
            for run in runs:
                client.checkpoints(context).undo(run)
        assert _files(folder) == before, about
    until(lambda: f"{folder.parent}/" not in Path("/proc/self/mountinfo").read_text())


def _files(folder: Path) -> dict[str, str]:
    """Return every file with its content, every link with its target."""
    found = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    return {
        str(path.relative_to(folder)): f"-> {path.readlink()}" if path.is_symlink() else path.read_text()
        for path in found
    }


def _runs(folder: Path) -> list[str]:
    """Return the runs on the folder, newest first."""
    with client_for(str(folder)) as client:
        try:
            return [run.start.id for run in find_runs(client, str(folder)) if run.start.kind == "start"]
        except NotFound:
            return []


def _server(data: Path) -> int:
    """Return the process of the server, 0 if none runs."""
    for pid, command in _processes().items():
        if "carrel.cli.here.serve" in command and str(data) in command:
            return pid
    return 0


def _processes() -> dict[int, list[str]]:
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                found[int(entry)] = Path(f"/proc/{entry}/cmdline").read_text(errors="replace").split("\0")
            except OSError:
                continue
    return found
