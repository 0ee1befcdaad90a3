"""`carrel here` as an ordinary user: streams, owners, the kept home, a full-screen program, many deletions, undo."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from tests.support.here_ground import Screen, ended, here
from tests.support.servers import ROOT, USER, as_user, readable


@pytest.mark.skipif(not ROOT, reason="the other tests of `carrel here` run as an ordinary user already")
def test_a_folder_of_an_ordinary_user(request: pytest.FixtureRequest) -> None:
    base = Path(os.path.realpath(tempfile.mkdtemp(prefix="u-")))
    request.addfinalizer(lambda: shutil.rmtree(base))
    base.chmod(0o755)
    folder = base / "project"
    for path in (folder, folder / "many", base / "home", base / "home/.config", base / "home/.config/carrel"):
        path.mkdir()
        os.chown(path, USER, USER)
    for number in range(20):
        (folder / f"many/{number}").write_text(str(number))
    (base / "home/.config/carrel/here.toml").write_text("delete_limit = 10\n")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("CARREL_", "XDG_"))}
    env = {
        **kept,
        "HOME": str(base / "home"),
        "CARREL_DATA_DIR": str(base / "home/data"),
        "TERM": "xterm",
        "PYTHONPATH": readable(base),
    }
    carrel = as_user([os.path.realpath(sys.executable), "-m", "carrel"])
    command = [*carrel, "here", "--name", "one"]
    (folder / "given.txt").write_text("given")
    os.chown(folder / "given.txt", USER, USER)
    # One terminal lives on meanwhile, so that all commands share its server.
    screen = Screen([*carrel, "here", "--", "vim", "-u", "NONE", "notes.txt"], env, folder)
    screen.wait(b"\x1b[?1049h")

    script = "pwd; cat given.txt; echo new > given.txt; mkdir made; cat; echo err >&2; echo kept > ~/history; exit 7"
    done = here(env, folder, "--", "sh", "-c", script, stdin=b"piped", command=command)
    assert (done.stdout, done.returncode) == (f"{folder}\ngivenpiped".encode(), 7), done.stderr
    assert b"err" in done.stderr
    assert {path.stat().st_uid for path in folder.iterdir()} == {USER}
    assert here(env, folder, "--", "cat", "/home/agent/history", command=command).stdout == b"kept\n"
    runs = here(env, folder, "log", "--json", command=carrel)
    assert here(env, folder, "undo", "--yes", _id_of_first_run(runs.stdout), command=carrel).returncode == 0
    assert sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")) == ["given.txt", "many"]
    assert (folder / "given.txt").read_text() == "given"

    screen.type(b"ihello\x1b:w\r:call system('rm -r many; sleep 90; touch after')\r")
    assert b"many/" in screen.wait(b"[d] deny")
    assert (folder / "notes.txt").read_text() == "hello\n"
    screen.answer(b"d")
    assert screen.end() == 128 + signal.SIGKILL, screen.seen
    assert not (folder / "after").exists()
    undone = here(env, folder, "undo", "--yes", command=carrel)
    assert undone.returncode == 0, undone.stderr
    assert sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")) == ["given.txt", "many"]
    assert [(folder / f"many/{number}").read_text() for number in range(20)] == [str(number) for number in range(20)]
    ended(base / "home/data-here")


def _id_of_first_run(runs: bytes) -> str:
    """Return the oldest run of the agent `one`."""
    return next(str(run["id"]) for run in reversed(json.loads(runs)) if run["context_id"].endswith("-one"))
