"""Shared setup of the benchmarks: sandboxes of a provider, and a running server. Both are removed
when the block ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.measure import BenchFailed
from bench.wire import TRUE_BODY, Address, answer_size, body_of, request
from carrel.errors import CarrelError
from carrel.isolation.rootfs import SANDBOX_UID
from carrel.models import Network
from carrel.providers import Handle, Launch, Provider, open_providers

RUN_TRUE = request("POST", "/commands?wait=1", TRUE_BODY)
RUN_BIN_TRUE = request("POST", "/commands?wait=1", b'{"command":["/bin/true"],"timeout":20}')
# A zygote as the provider starts it, but without spare sandboxes.
WITHOUT_SPARES = "from carrel.isolation import zygote; zygote.SPARES = 0; zygote.main()"


@asynccontextmanager
async def scratch() -> AsyncIterator[Path]:
    """Make a directory that is removed with the block."""
    place = Path(tempfile.mkdtemp(prefix="carrel-bench-"))
    place.chmod(0o755)  # sandboxes of an ordinary user need access to the workspaces
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


async def memory_of(provider: Provider, handles: Sequence[Handle]) -> list[int]:
    """Return the memory of each sandbox in bytes, 0 where it is not known."""
    found = await provider.resources(handles)
    used = [found.get(str(handle["id"])) for handle in handles]
    return [0 if each is None else each.memory_bytes or 0 for each in used]


class Sandboxes:
    """Sandboxes directly from the namespace provider, with limits as in real use."""

    def __init__(self, provider: Provider, workspaces: Path, images: Path):
        self.provider = provider
        self.images = images
        self._workspaces = workspaces
        self._count = 0
        self._alive: dict[str, Handle] = {}

    def workspace(self) -> Launch:
        """Make an empty workspace and the order to start a sandbox on it. This is not measured."""
        self._count += 1
        name = f"b{self._count}"
        place = self._workspaces / name
        place.mkdir()
        if os.geteuid() == 0:
            os.chown(place, SANDBOX_UID, SANDBOX_UID)
        return Launch(name, str(place), Network.NONE, memory_mb=512, processes=256)

    async def start(self, launch: Launch | None = None) -> Handle:
        """Start a sandbox."""
        handle = await self.provider.start(launch or self.workspace())
        self._alive[str(handle["id"])] = handle
        return handle

    async def remove(self, handle: Handle) -> None:
        """Stop a sandbox and remove its workspace."""
        await self.provider.remove(handle)
        name = str(handle["id"])
        self._alive.pop(name, None)
        shutil.rmtree(self._workspaces / name, ignore_errors=True)

    async def remove_all(self) -> None:
        """Stop every sandbox. A failure of one does not affect the others."""
        answers = await asyncio.gather(*map(self.remove, list(self._alive.values())), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer


def reach(handle: Handle) -> str:
    """Return the socket of a sandbox's supervisor."""
    return str(handle["socket"])


@asynccontextmanager
async def sandboxes(*, spares: bool = True) -> AsyncIterator[Sandboxes]:
    """Run a separate namespace provider."""
    async with scratch() as place:
        run, workspaces = place / "run", place / "ws"
        run.mkdir()
        workspaces.mkdir()
        provider = open_providers(str(run), str(workspaces), allow_process=False, images=str(place / "images"))[
            "namespace"
        ]
        missing = provider.missing()
        if missing is not None:
            raise BenchFailed(f"the namespace provider cannot be used here: {missing}")
        zygote = None if spares else _zygote_without_spares(run, workspaces)
        made = Sandboxes(provider, workspaces, place / "images")
        try:
            # The first start also starts the zygote; later starts do not.
            await made.remove(await made.start())
            yield made
        finally:
            try:
                await made.remove_all()
            finally:
                await provider.close()
                if zygote is not None:
                    wait_or_kill(zygote, 10)


def _zygote_without_spares(run: Path, workspaces: Path) -> subprocess.Popen[bytes]:
    """Start a zygote where the provider looks for a running one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(run / "zygote-namespace.sock"))
        listener.listen(8)
        command = [sys.executable, "-c", WITHOUT_SPARES, "--listen-fd", str(listener.fileno())]
        command += ["--workspaces", str(workspaces), "--supervisor", "carrel.supervisor.app"]
        environment = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "1"}
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )


def wait_or_kill(process: subprocess.Popen[Any], seconds: float) -> None:
    """Wait for a process that was asked to end; kill it if it does not."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


async def first_command(handle: Handle, message: bytes = RUN_BIN_TRUE) -> None:
    """Run a command on a new connection, with as little overhead as an event loop allows."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as connection:
        await loop.sock_connect(connection, reach(handle))
        await loop.sock_sendall(connection, message)
        data = b""
        while (size := answer_size(data)) is None or len(data) < size:
            more = await loop.sock_recv(connection, 65536)
            if not more:
                raise BenchFailed(f"sandbox {handle['id']} hung up before it answered")
            data += more
    if json.loads(body_of(data))["exit_code"] != 0:
        raise BenchFailed(f"the first command failed: {data[-500:].decode(errors='replace')}")


@dataclass(frozen=True)
class Server:
    """A `carrel serve` in a separate process."""

    url: str
    token: str
    data: Path

    @property
    def address(self) -> Address:
        """The host and port of the server."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def run_true(self, sandbox_id: str) -> bytes:
        """Return the request of an API client that runs `true`."""
        headers = {"authorization": f"Bearer {self.token}", "content-type": "application/json"}
        return request("POST", f"/v1/sandboxes/{sandbox_id}/commands", TRUE_BODY, headers)


@asynccontextmanager
async def server(settings: Mapping[str, str] = MappingProxyType({})) -> AsyncIterator[Server]:
    """Run a server with its own data directory; `settings` are more variables of its environment. It ends with the
    block, and its sandboxes with it.
    """
    async with scratch() as place:
        data = place / "data"
        command = [sys.executable, "-m", "carrel", "serve", "--port", "0", "--data-dir", str(data)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CARREL_")}
        environment |= settings
        with (place / "server.log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=place, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        try:
            deadline = time.monotonic() + 30
            while not (data / "server.json").exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise BenchFailed("the server did not start:\n" + (place / "server.log").read_text()[-2000:])
                await asyncio.sleep(0.02)
            url = str(json.loads((data / "server.json").read_text())["url"])
            yield Server(url, (data / "token").read_text().strip(), data)
        except CarrelError as error:
            raise BenchFailed(f"{error}\n{(place / 'server.log').read_text()[-1000:]}") from error
        finally:
            process.send_signal(signal.SIGTERM)
            wait_or_kill(process, 30)
