"""A real server in its own process; every test makes its own sandboxes on it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.support.fork_server import Forked, start

from carrel.client import AsyncClient, AsyncSandbox, Client, Sandbox


def start_server(directory: Path, workers: int = 1) -> Forked | subprocess.Popen[bytes]:
    """Start a server; it is forked where a fork server runs."""
    command = [sys.executable, "-m", "carrel", "serve", "--port", "0", "--data-dir", str(directory)]
    command += ["--set", "sandbox.allow_process=true", "--workers", str(workers)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("CARREL_")}
    with (directory.parent / "server.log").open("ab") as log:
        server = start(command, env=environment, stdout=log, stderr=log)
    deadline = time.monotonic() + 90
    while not (directory / "server.json").exists():
        if server.poll() is not None or time.monotonic() > deadline:
            server.kill()
            server.wait()
            pytest.fail("the server did not start:\n" + (directory.parent / "server.log").read_text())
        time.sleep(0.02)
    return server


@pytest.fixture(scope="session")
def data_dir(
    tmp_path_factory: pytest.TempPathFactory, carrel_forks: None, pytestconfig: pytest.Config
) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("server") / "data"
    server = start_server(directory, pytestconfig.getoption("--workers-of-server"))
    try:
        yield directory
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(30)
        finally:
            server.kill()
            server.wait()


@pytest.fixture
def address(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("CARREL_URL", raising=False)
    monkeypatch.delenv("CARREL_TOKEN", raising=False)
    monkeypatch.setenv("CARREL_DATA_DIR", str(data_dir))
    return str(json.loads((data_dir / "server.json").read_bytes())["url"])


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(administrator=True) as client:
        yield client


@pytest.fixture
def box(client: Client) -> Iterator[Sandbox]:
    with client.sandbox() as box:
        yield box


@pytest.fixture
async def async_client(address: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(administrator=True) as client:
        yield client


@pytest.fixture
async def async_box(async_client: AsyncClient) -> AsyncIterator[AsyncSandbox]:
    async with await async_client.sandbox() as box:
        yield box
