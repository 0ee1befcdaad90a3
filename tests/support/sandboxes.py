"""Real sandboxes for tests: a provider on directories of its own or on a zygote the whole run shares, and a client of
the supervisor's socket."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tests.support.leaks import below

from carrel.isolation import probe
from carrel.models import Network
from carrel.providers import Handle, Launch, Provider, open_providers

ROOT = os.geteuid() == 0
KINDS = [name for name in ("namespace", "process") if name == "process" or probe.host().missing is None]
NETWORK = {"namespace": Network.NONE, "process": Network.HOST}
SANDBOX_UID = 1000
_count = itertools.count(1)


async def until(condition: Callable[[], Awaitable[Any] | Any], timeout: float = 30, what: str = "a condition") -> Any:
    """Wait for a condition to hold, and give its value."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        assert time.monotonic() < deadline, f"waited {timeout} s for {what}"
        await asyncio.sleep(0.01)


class Supervisor:
    """The control plane's view of one sandbox: HTTP on its socket."""

    def __init__(self, path: str):
        self.path = path
        transport = httpx.AsyncHTTPTransport(uds=path, limits=httpx.Limits(max_connections=None))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://sandbox", timeout=30)

    async def call(self, method: str, path: str, body: object = None, **params: object) -> httpx.Response:
        """One request, whatever comes of it."""
        content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        return await self.http.request(method, path, content=content, params={k: str(v) for k, v in params.items()})

    async def ask(self, method: str, path: str, body: object = None, **params: object) -> Any:
        """One request that must work."""
        answer = await self.call(method, path, body, **params)
        assert answer.is_success, answer.text
        return answer.json() if answer.content else None

    async def refused(self, method: str, path: str, body: object = None, **params: object) -> dict[str, Any]:
        """One request that must fail: its problem."""
        answer = await self.call(method, path, body, **params)
        assert answer.is_error, answer.text
        assert answer.headers["content-type"] == "application/problem+json"
        problem = answer.json()
        assert problem["status"] == answer.status_code
        return dict(problem)

    async def run(self, command: str | list[str], **more: object) -> dict[str, Any]:
        """A command to its end."""
        body = {"command": command, "timeout": 20, **more}
        return dict(await self.ask("POST", "/commands", body, wait=1))

    async def start(self, command: str | list[str], **more: object) -> str:
        """A command in the background: its id."""
        return str((await self.ask("POST", "/commands", {"command": command, "timeout": 60, **more}))["id"])

    async def result(self, name: str) -> dict[str, Any]:
        """The result of a command, once it has ended."""
        return dict(await self.ask("GET", f"/commands/{name}/result"))

    async def info(self, name: str) -> dict[str, Any]:
        """A command as it stands."""
        return dict(await self.ask("GET", f"/commands/{name}"))

    async def text(self, name: str) -> str:
        """The output so far, both streams together."""
        return "".join([data.decode(errors="replace") async for kind, data in self.frames(name, follow=0) if kind])

    async def frames(self, name: str, *, offset: int = 0, follow: int = 1) -> AsyncIterator[tuple[int, bytes]]:
        """Output frames up to and with the end frame."""
        params = {"offset": offset, "follow": follow}
        async for frame in self._frames("GET", f"/commands/{name}/output", params):
            yield frame

    async def followed(self, command: str | list[str], **more: object) -> AsyncIterator[tuple[int, bytes]]:
        """A command started and followed in one request: its frames up to and with the end frame."""
        async for frame in self._frames(
            "POST", "/commands", {"follow": 1}, {"command": command, "timeout": 20, **more}
        ):
            yield frame

    async def _frames(
        self, method: str, path: str, params: dict[str, int], body: object = None
    ) -> AsyncIterator[tuple[int, bytes]]:
        async with self.http.stream(method, path, params=params, json=body) as answer:
            assert answer.status_code == 200
            held = b""
            async for chunk in answer.aiter_bytes():
                held += chunk
                while len(held) >= 5 and len(held) >= 5 + (size := int.from_bytes(held[1:5], "big")):
                    yield held[0], held[5 : 5 + size]
                    held = held[5 + size :]
            assert held == b""

    async def shows(self, name: str, words: str, timeout: float = 30) -> str:
        """Wait for words in a command's output."""

        async def there() -> str | None:
            text = await self.text(name)
            return text if words in text else None

        return str(await until(there, timeout, f"{words!r} in the output of {name}"))


@dataclass
class Box:
    """One sandbox with its workspace."""

    kind: str
    handle: Handle
    workspace: Path
    supervisor: Supervisor

    @property
    def pid(self) -> int:
        """The supervisor, as the host sees it."""
        return int(self.handle["pid"] or 0)

    def count(self, words: str) -> int:
        """How many processes of this sandbox have a command line that starts with these words."""
        return sum(line.startswith(words) for line in below(self.pid).values())

    def isolated(self) -> bool:
        return self.kind == "namespace"


@dataclass
class House:
    """A run directory and a workspaces directory with a provider on them."""

    kind: str
    directory: Path
    provider: Provider = field(init=False)

    def __post_init__(self) -> None:
        for name in ("run", "ws"):
            (self.directory / name).mkdir(exist_ok=True)
        self.provider = self.another_provider()

    def another_provider(self) -> Provider:
        """A second provider object on the same directories, as after a restart of the control plane."""
        run, workspaces, images = (str(self.directory / name) for name in ("run", "ws", "images"))
        return open_providers(run, workspaces, allow_process=True, images=images)[self.kind]

    def workspace(self) -> Path:
        """A new, empty workspace with the owner a sandbox expects."""
        path = self.directory / "ws" / f"w{next(_count)}-{os.getpid()}"
        path.mkdir()
        if ROOT:
            os.chown(path, SANDBOX_UID, SANDBOX_UID)
        return path

    def launch(self, **more: Any) -> Launch:
        """A launch on a new workspace."""
        workspace = more.pop("workspace", None) or str(self.workspace())
        network = more.pop("network", NETWORK[self.kind])
        return Launch(f"s{next(_count)}", workspace, network, **more)

    @asynccontextmanager
    async def box(self, **limits: Any) -> AsyncIterator[Box]:
        """A running sandbox, removed at the end."""
        launch = self.launch(**limits)
        handle = await self.provider.start(launch)
        box = Box(self.kind, handle, Path(launch.workspace), Supervisor(str(handle["socket"])))
        try:
            yield box
        finally:
            await box.supervisor.http.aclose()
            await self.provider.remove(handle)
            assert not await self.provider.alive(handle)
            assert not Path(str(handle["socket"])).exists()
            shutil.rmtree(launch.workspace)


@asynccontextmanager
async def provider(kind: str, directory: Path | None = None) -> AsyncIterator[House]:
    """A provider with a zygote of its own, gone at the end. The directory is short: socket paths end at 107 bytes."""
    where = Path(tempfile.mkdtemp(prefix="p", dir=directory))
    where.chmod(0o755)
    house = House(kind, where)
    try:
        yield house
    finally:
        await house.provider.close()
        shutil.rmtree(where)


def parent(pid: int) -> int:
    """The parent of a process."""
    return int(status(pid)["PPid"])


def status(pid: int) -> dict[str, str]:
    """`/proc/PID/status`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
