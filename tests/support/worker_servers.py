"""Servers with several workers, each server in processes of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from pydantic import BaseModel, SecretStr
from tests.support.fork_server import Forked, start

from carrel.config import Settings

START_S = 90.0
_WRITER = -1


@dataclass
class ServerWithWorkers:
    """A running server of several processes."""

    url: str
    token: str | None
    data_dir: str
    process: Forked | subprocess.Popen[bytes]
    log: Path

    @property
    def plane(self) -> object:
        """There is one in each worker, out of reach of a test."""
        pytest.skip("the test looks into the process of the server, and there are several")

    def http(self, token: str | None = None) -> httpx.AsyncClient:
        """A client with connections of its own."""
        headers = {"authorization": f"Bearer {token or self.token}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=60)

    def worker(self, index: int) -> httpx.AsyncClient:
        """A client of one worker, at the socket at which the others reach it."""
        socket = os.path.join(self.data_dir, "run", f"worker-{index}.sock")
        headers = {"authorization": f"Bearer {self.token}"}
        transport = httpx.AsyncHTTPTransport(uds=socket)
        return httpx.AsyncClient(base_url="http://localhost", headers=headers, timeout=60, transport=transport)

    def pids(self) -> dict[int, int]:
        """The processes of the workers, by their numbers: each has its Unix socket."""
        return {index: pid for index, pid in self._processes().items() if index != _WRITER}

    def writer(self) -> int | None:
        """The process that writes the records of all workers; None while it is replaced."""
        return self._processes().get(_WRITER)

    def _processes(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for child in psutil.Process(self.process.pid).children():
            try:
                connections = child.net_connections("unix")
            except psutil.NoSuchProcess:  # it was killed
                continue
            for connection in connections:
                name = os.path.basename(connection.laddr or "")
                if connection.status in {"LISTEN", "NONE"} and name.startswith("worker-"):
                    found.setdefault(int(name.removeprefix("worker-").removesuffix(".sock")), child.pid)
                elif name == "writer.sock":
                    found.setdefault(_WRITER, child.pid)
        return found


def _flags(model: BaseModel, prefix: str = "") -> Iterator[str]:
    """The settings that are not the defaults, as words of the command line."""
    for name, info in type(model).model_fields.items():
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from _flags(value, f"{prefix}{name}.")
        elif value != info.default and name != "data_dir" and value is not None:
            plain = value.get_secret_value() if isinstance(value, SecretStr) else value
            yield from ("--set", f"{prefix}{name}={str(plain).lower() if isinstance(plain, bool) else plain}")


@contextmanager
def server_with_workers(settings: Settings, count: int) -> Iterator[ServerWithWorkers]:
    """A server with `count` workers until the block ends."""
    data = Path(settings.data_dir)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("CARREL_")}
    command = [sys.executable, "-m", "carrel", "serve", "--data-dir", str(data), "--workers", str(count)]
    path = data.parent / f"{data.name}.log"
    with path.open("wb") as log:
        process = start([*command, *_flags(settings)], env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_S
        while not (data / "server.json").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail("the server did not start:\n" + path.read_text())
            time.sleep(0.01)
        url = json.loads((data / "server.json").read_text())["url"]
        token = (data / "token").read_text().strip() if settings.auth else None
        yield ServerWithWorkers(url, token, str(data), process, path)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()
            path.unlink()
