"""The one-minute try of the how-to about approvals, as a reader does it: two terminals on the server's machine."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

from carrel import Client

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/approve-what-agents-ask.md").read_text()


def terminal(command, env):
    """A command at a terminal of its own: the process, and the end to type at."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        ["sh", "-c", command], stdin=theirs, stdout=theirs, stderr=theirs, env=env, cwd=ROOT, start_new_session=True
    )
    os.close(theirs)
    return process, ours


def read_until(descriptor, wanted, deadline=60):
    seen, end = b"", time.monotonic() + deadline
    while wanted not in seen:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, end - time.monotonic()))
        assert ready, f"no {wanted!r} in {seen!r}"
        seen += os.read(descriptor, 65536)
    return seen


def test_one_developer_tries_approvals(tmp_path, monkeypatch):
    data = tmp_path / "data"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CARREL_")}
    env = {**kept, "CARREL_DATA_DIR": str(data), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    [policy] = re.findall(r"^```sh\n(carrel policy set research.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    asks, decides = re.findall(r"^```console\n\$ (.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    server = subprocess.Popen(
        [sys.executable, "-m", "carrel", "serve", "--port", "0", "--data-dir", str(data)],
        stdout=subprocess.PIPE, env=env, text=True,
    )  # fmt: skip
    ends = []
    try:
        assert server.stdout is not None and "listens on" in server.stdout.readline()
        assert subprocess.run(["sh", "-c", policy], env=env, cwd=ROOT, check=False).returncode == 0
        program, first = terminal(asks, env)
        ends.append(first)
        for name in ("CARREL_URL", "CARREL_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("CARREL_DATA_DIR", str(data))
        with Client() as watcher:
            next(iter(watcher.approvals.watch()))  # the program has asked
        person, second = terminal(decides, env)
        ends.append(second)
        shown = read_until(second, b"approve it?")
        assert b"agent:local, in research" in shown and b"uname -s" in shown
        os.write(second, b"y\n")
        assert b"approved apr-" in read_until(second, b"uname -s\r\n")
        assert person.wait(30) == 0
        assert b"the answer is Linux" in read_until(first, b"Linux")
        assert program.wait(30) == 0
    finally:
        for each in ends:
            os.close(each)
        server.terminate()
        server.stdout.close()
        assert server.wait(30) == 0
