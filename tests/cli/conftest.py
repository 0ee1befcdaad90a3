"""The real command in a real process, with or without a real server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.cli_process import CliServer
from tests.support.fork_server import CARREL, IMPORTED, start

Carrel = Callable[..., subprocess.CompletedProcess[bytes]]


def environment(directory: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("CARREL_")}
    return {**kept, "CARREL_DATA_DIR": str(directory), "COLUMNS": "200", "TERM": "xterm"}


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory, carrel_forks: None) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("server") / "data"
    command = [sys.executable, "-m", "carrel", "serve", "--port", "0", "--data-dir", str(directory)]
    command += ["--set", "sandbox.allow_process=true", "--set", f"sandbox.folder_roots={tempfile.gettempdir()}"]
    log = directory.parent / "server.log"
    with log.open("ab") as output:
        server = start(command, env=environment(directory), stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 90
        while not (directory / "server.json").exists():
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.fail("the server did not start:\n" + log.read_text())
            time.sleep(0.02)
        yield directory
        server.send_signal(signal.SIGTERM)
        server.wait(30)
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="session")
def cli_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CliServer]:
    directory = tmp_path_factory.mktemp("cli")
    # Also what `carrel mcp` and the commands that need no server import: two seconds, and dozens of tests start them.
    late = ("carrel.integrations.mcp.server", *IMPORTED[CARREL])
    server = CliServer(directory, environment(directory), *late)
    yield server
    server.close()


def _runner(directory: Path, server: CliServer) -> Carrel:
    def run(
        *words: str,
        stdin: bytes | None = None,
        env: dict[str, str] | None = None,
        timeout: float = 60,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[bytes]:
        forked = all(name.startswith("CARREL_") for name in env or ())
        command = server.command(*words) if forked else [sys.executable, "-m", "carrel", *words]
        return subprocess.run(
            command,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            env={**environment(directory), **(env or {})},
            timeout=timeout,
            check=False,
            cwd=cwd,
        )

    return run


@pytest.fixture
def carrel(data_dir: Path, cli_server: CliServer) -> Carrel:
    """The command beside a running server."""
    return _runner(data_dir, cli_server)


@pytest.fixture
def alone(tmp_path: Path, cli_server: CliServer) -> Carrel:
    """The command on a machine where no server runs."""
    return _runner(tmp_path / "nothing", cli_server)
