"""Several real servers on one PostgreSQL and one archive, each a process of its own that can be killed."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import asyncpg
import httpx
from tests.support.fork_server import Forked, start
from tests.support.leaks import below

TOKEN = "carrel-test-administrator"
START_S = 90.0


class Fleet:
    """The servers, by name. All have the same administrator's token and the same secret, unless told otherwise."""

    def __init__(self, database: str, **settings: str):
        self.directory = Path(tempfile.mkdtemp(prefix="fleet"))
        self._environment = {key: value for key, value in os.environ.items() if not key.startswith("CARREL_")}
        self._environment |= {
            "CARREL_DATABASE": database,
            "CARREL_ARCHIVE": str(self.directory / "archive"),
            "CARREL_SECRET_KEY": base64.b64encode(secrets.token_bytes(32)).decode(),
            "CARREL_TOKEN": TOKEN,
            "CARREL_VOLUMES": "directory",
            "CARREL_SANDBOX_ALLOW_PROCESS": "true",
            "CARREL_MAX_BODY_MB": "2",
            **settings,
        }
        self._processes: dict[str, Forked | subprocess.Popen[bytes]] = {}
        self._urls: dict[str, str] = {}

    def start(
        self,
        name: str,
        *,
        port: int = 0,
        host: str = "127.0.0.1",
        program: Sequence[str] = ("-m", "carrel"),
        within: Sequence[str] = (),
        **settings: str,
    ) -> None:
        """Start a server without waiting for it. A setting that is empty is left out. `program`: how Python starts it;
        `within`: the words before that, which put it somewhere else.
        """
        data = self.directory / name
        (data / "server.json").unlink(missing_ok=True)
        environment = {**self._environment, "CARREL_NODE": name, **settings}
        with (self.directory / f"{name}.log").open("ab") as log:
            self._processes[name] = start(
                [
                    *within,
                    sys.executable,
                    *program,
                    "serve",
                    "--host",
                    host,
                    "--port",
                    str(port),
                    "--data-dir",
                    str(data),
                ],
                env={key: value for key, value in environment.items() if value},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def ready(self, *names: str) -> None:
        """Wait until these servers take requests."""
        deadline = time.monotonic() + START_S
        for name in names:
            while not self._record(name):
                assert self._processes[name].poll() is None and time.monotonic() < deadline, self.log(name)
                time.sleep(0.02)

    def _record(self, name: str) -> dict[str, object]:
        try:
            found = json.loads((self.directory / name / "server.json").read_bytes())
        except (OSError, ValueError):
            return {}
        return found if found["pid"] == self._processes[name].pid else {}

    def url(self, name: str) -> str:
        return str(self._record(name)["url"])

    def last_url(self, name: str) -> str:
        """Where a server listens, or did until it ended."""
        if found := self._record(name):
            self._urls[name] = str(found["url"])
        return self._urls[name]

    def http(self, name: str, token: str = TOKEN) -> httpx.AsyncClient:
        """A client of one server."""
        headers = {"authorization": f"Bearer {token}"}
        return httpx.AsyncClient(base_url=self.url(name), headers=headers, timeout=60)

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text(errors="replace")

    def setting(self, name: str) -> str:
        """A setting that all servers have."""
        return self._environment[name]

    async def boot(self, name: str) -> str:
        """The process of a server, as the others know it."""
        return str(await self._fetch("SELECT boot FROM nodes WHERE name = $1", name))

    async def _fetch(self, query: str, *values: object) -> object:
        connection = await asyncpg.connect(self.setting("CARREL_DATABASE"))
        try:
            return await connection.fetchval(query, *values)
        finally:
            await connection.close()

    def running(self, name: str) -> bool:
        return self._processes[name].poll() is None

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def kill(self, name: str) -> None:
        """Kill the server process and nothing else: its sandboxes live on until it is started again."""
        self._processes[name].send_signal(signal.SIGKILL)
        self._processes[name].wait(30)

    def lose(self, name: str) -> None:
        """End a server with everything that it started, and remove its data directory: its machine is gone."""
        processes = [self.pid(name), *(pid for pid, _started in below(self.pid(name)))]
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._processes.pop(name).wait(30)
        for pid in processes[1:]:
            with suppress(ChildProcessError):  # what was orphaned belongs to the tests
                os.waitpid(pid, 0)
        shutil.rmtree(self.directory / name)

    def stop(self, *names: str) -> None:
        """End servers as their operator would."""
        for name in names:
            self._processes[name].send_signal(signal.SIGTERM)
        for name in names:
            self._processes[name].wait(60)
            del self._processes[name]

    def close(self) -> None:
        """End everything. What a killed server left is ended by the next one of its name."""
        for name, process in list(self._processes.items()):
            if process.poll() is not None:
                self.start(name)
                self.ready(name)
        self.stop(*list(self._processes))
        shutil.rmtree(self.directory)


async def eventually(client: httpx.AsyncClient, method: str, path: str, **given: object) -> httpx.Response:
    """Ask until the answer is no retryable error, as a client that heeds `Retry-After` does."""
    async with asyncio.timeout(60):
        while True:
            answer = await client.request(method, path, **given)  # type: ignore[arg-type]
            if answer.status_code != 503:
                return answer
            assert int(answer.headers["retry-after"]) >= 1 and answer.json()["retry"] is True, answer.text
            await asyncio.sleep(0.1)
