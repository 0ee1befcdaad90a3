"""E2B's SDKs as published, unmodified, against a server: every call that the compatibility page names."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import e2b_sdks
from tests.support.e2b_calls import CALLS
from tests.support.e2b_domain import standing_before
from tests.support.servers import SOURCE

DOMAIN = "sandboxes.example"
ROOT = Path(__file__).parents[2]


class KillableServer:
    """A server that can be killed and started again on the same port."""

    def __init__(self, data: Path):
        self.data, self.port, self.process = data, 0, None

    def start(self) -> None:
        (self.data / "server.json").unlink(missing_ok=True)
        words = ["setpriv", "--pdeathsig=TERM", "--", sys.executable, "-m", "carrel", "serve"]
        words += ["--port", str(self.port), "--data-dir", str(self.data)]
        words += ["--set", f"ports.domain={DOMAIN}", "--set", "pool.size=0"]
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.data), "PYTHONPATH": str(SOURCE)}
        self.process = subprocess.Popen(
            words,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
        deadline = time.monotonic() + 90
        while not (self.data / "server.json").exists():
            assert self.process.poll() is None and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.02)
        self.port = int(self.url.rpartition(":")[2])

    def end(self, how: int) -> None:
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(60)

    @property
    def url(self) -> str:
        return str(json.loads((self.data / "server.json").read_text())["url"])

    def variables(self, **more: str) -> dict[str, str]:
        return e2b_sdks.variables(self.url, (self.data / "token").read_text().strip(), more)


@pytest.fixture(scope="module")
def e2b_server() -> Iterator[KillableServer]:
    folder = Path(tempfile.mkdtemp(prefix="carrel-e2b-"))
    server = KillableServer(folder)
    with contextlib.ExitStack() as ending:
        ending.callback(shutil.rmtree, folder)
        server.start()
        ending.callback(lambda: server.end(signal.SIGTERM))
        yield server


def told(done: subprocess.CompletedProcess[str]) -> dict[str, str | None]:
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, [each for each in lines if each["failed"]] or done.stderr[-3000:]
    return {each["call"]: each["failed"] for each in lines}


def test_python_sdk_makes_every_declared_call(e2b_server: KillableServer) -> None:
    command = [str(e2b_sdks.python()), str(e2b_sdks.SCRIPTS / "calls.py")]
    found = told(e2b_sdks.made(command, e2b_server.variables()))
    assert set(found) == {call.python for call in CALLS}


def test_javascript_sdk_makes_every_declared_call(e2b_server: KillableServer) -> None:
    found = told(e2b_sdks.made(e2b_sdks.node("calls.mjs"), e2b_server.variables()))
    assert set(found) == {call.javascript for call in CALLS if call.javascript}


def test_asynchronous_python_sdk(e2b_server: KillableServer) -> None:
    command = [str(e2b_sdks.python()), str(e2b_sdks.SCRIPTS / "calls_async.py")]
    done = e2b_sdks.made(command, e2b_server.variables())
    assert done.returncode == 0, done.stderr


def test_program_of_the_how_to_page(e2b_server: KillableServer) -> None:
    page = (ROOT / "docs/how-to/move-from-e2b.md").read_text()
    [program] = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    done = e2b_sdks.made([str(e2b_sdks.python()), "-c", program], e2b_server.variables())
    assert (done.returncode, done.stdout) == (0, "3\n\n"), done.stderr


@pytest.mark.parametrize("script", ["domain.py", "domain.mjs"])
def test_sandboxes_by_their_names_below_a_domain(e2b_server: KillableServer, tmp_path: Path, script: str) -> None:
    command = [str(e2b_sdks.python()), str(e2b_sdks.SCRIPTS / script)] if script.endswith("py") else None
    with standing_before(e2b_server.port, DOMAIN, tmp_path) as (proxy, authority):
        trusted = dict.fromkeys(("SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS"), str(authority))
        environment = e2b_server.variables(E2B_DOMAIN=DOMAIN, TEST_PROXY=proxy, **trusted)
        del environment["E2B_API_URL"], environment["E2B_SANDBOX_URL"]
        done = e2b_sdks.made(command or e2b_sdks.node(script), environment)
    assert done.returncode == 0, done.stderr


def test_killed_server_and_a_pause_lose_nothing(e2b_server: KillableServer) -> None:
    command = [str(e2b_sdks.python()), str(e2b_sdks.SCRIPTS / "restart.py")]
    with subprocess.Popen(
        command, env=e2b_server.variables(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdin is not None and client.stdout is not None
        assert client.stdout.readline().strip().isdigit()
        e2b_server.end(signal.SIGKILL)
        e2b_server.start()
        client.communicate("\n", timeout=100)
        assert client.returncode == 0
