"""The client of a zygote: starts it, finds it again after a restart, and requests sandboxes from it."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from carrel.errors import PlatformError, ProviderUnavailable
from carrel.isolation.inside import MOST_DESCRIPTORS
from carrel.primitives.channel import MAX_MESSAGE, Channel, ChannelClosed, close_all, connect, start, wait_for_end
from carrel.primitives.tasks import readable
from carrel.primitives.trees import Identity

START_DEADLINE_S = 30.0
PROBE_S = 5.0
FOLDER_DEADLINE_S = 15.0
SUPERVISOR = "carrel.supervisor.app"


class ZygoteClient:
    """The client of one zygote, which is started on first use and again when it has died. For one event loop."""

    def __init__(
        self,
        run_dir: str,
        workspaces: str,
        *,
        plain: bool,
        shared: Mapping[str, str] = MappingProxyType({}),
        folder_roots: Sequence[str] = (),
        images: str = "",
    ):
        self._name = "plain" if plain else "namespace"
        self._path = os.path.join(run_dir, f"zygote-{self._name}.sock")
        self._log = os.path.join(run_dir, f"zygote-{self._name}.log")
        self._workspaces = workspaces
        self._plain = plain
        self._shared = dict(shared)
        self._folder_roots = tuple(folder_roots)
        self._images = images
        self._channel: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._seq = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._lock: asyncio.Lock | None = None
        self.description: dict[str, Any] = {}

    async def request(self, op: str, fds: tuple[int, ...] = (), **body: Any) -> dict[str, Any]:
        """Send a request and wait for the answer. Raises `PlatformError` with the zygote's own error text."""
        channel = self._channel or await self._connect()
        return await self._ask(channel, op, fds, body)

    async def known(self, op: str, **body: Any) -> dict[str, Any]:
        """Send a request to a zygote that may be gone; then the answer is empty."""
        self._lock = self._lock or asyncio.Lock()
        async with self._lock:  # a zygote that is being started accepts connections already, but one is enough
            if self._channel is None:
                try:
                    self._channel = self._open(connect(self._path))
                except OSError:
                    return {}
            channel = self._channel
        try:
            return await self._ask(channel, op, (), body)
        except PlatformError:
            return {}

    async def descriptor(self, op: str, **body: Any) -> int | None:
        """Request a descriptor from a zygote that may be gone. The caller closes it."""
        fds: list[int] = (await self.known(op, **body)).get("fds", [])
        return fds[0] if fds else None

    async def open_mounts(self, wanted: Sequence[tuple[str, Identity, bool]]) -> list[int]:
        """Return detached mounts of folders and files of the host, each given by its path, its identity and whether it
        is read-only. The caller closes them.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                await self.request("folder", (theirs.fileno(),), mounts=wanted)
            ours.setblocking(False)
            try:
                async with asyncio.timeout(FOLDER_DEADLINE_S):
                    await readable(ours.fileno())
            except TimeoutError:
                raise PlatformError("a folder cannot be mounted: its file system does not answer") from None
            error, fds, _flags, _address = socket.recv_fds(ours, 4096, MOST_DESCRIPTORS)
        if not fds:
            raise PlatformError(error.decode(errors="replace") or "a folder cannot be mounted: its file system is slow")
        return fds

    async def _ask(self, channel: Channel, op: str, fds: tuple[int, ...], body: dict[str, Any]) -> dict[str, Any]:
        self._seq += 1
        seq = self._seq
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[seq] = future
        try:
            channel.send({"seq": seq, "op": op, **body}, fds)
            async with asyncio.timeout(START_DEADLINE_S * 2):
                answer = await future
        except ValueError:
            raise PlatformError(
                "the request to start a sandbox is too large", hint="pass a smaller environment"
            ) from None
        except ChannelClosed:
            raise PlatformError(f"the zygote is gone; see {self._log}") from None
        except BaseException as error:
            if future.done() and not future.cancelled():  # the answer came after the request was cancelled
                close_all(future.result().get("fds", ()))
            if isinstance(error, TimeoutError):
                raise PlatformError(f"the zygote did not answer '{op}' in time") from None
            raise
        finally:
            self._waiting.pop(seq, None)
        if "error" in answer:
            close_all(answer.get("fds", ()))
            raise PlatformError(str(answer["error"]))
        return answer

    async def _connect(self) -> Channel:
        self._lock = self._lock or asyncio.Lock()
        async with self._lock:
            if self._channel is not None:
                return self._channel
            try:  # a zygote that is just ending still accepts connections, but does not describe itself
                return await self._greet(connect(self._path))
            except (OSError, PlatformError):
                self._hang_up()
            connection = await asyncio.get_running_loop().run_in_executor(None, self._spawn_once)
            try:
                return await self._greet(connection)
            except PlatformError as error:
                self._hang_up()
                raise ProviderUnavailable(
                    f"the {self._name} zygote did not start: {error.detail}",
                    hint=f"see {self._log}; run `carrel doctor`",
                ) from error

    async def _greet(self, connection: socket.socket) -> Channel:
        channel = self._channel = self._open(connection)
        self.description = await self._ask(channel, "describe", (), {})
        return channel

    def _spawn_once(self) -> socket.socket:
        """Start a zygote, unless another worker of the server has just started one."""
        directory = os.open(os.path.dirname(self._path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)  # it is released when this process ends, however it ends
            try:
                return _answering(self._path)
            except (OSError, ValueError):
                return self._spawn()
        finally:
            os.close(directory)

    def _spawn(self) -> socket.socket:
        if self._process is not None:  # the previous one, which has died
            try:
                self._process.wait(1)
            except subprocess.TimeoutExpired:
                self._process.returncode = 0  # it does not listen, but may still have sandboxes: leave it alone
        arguments = [
            "--workspaces",
            self._workspaces,
            "--supervisor",
            SUPERVISOR,
            *(["--plain"] if self._plain else []),
        ]
        for target, source in self._shared.items():
            arguments += ["--share", f"{target}={source}"]
        for root in self._folder_roots:
            arguments += ["--folder-root", root]
        if self._images:
            arguments += ["--images", self._images]
        passed_on = ("PATH", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "LD_LIBRARY_PATH")
        environment = {name: os.environ[name] for name in passed_on if name in os.environ}
        environment |= {"LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "1"}
        with suppress(FileNotFoundError):
            os.unlink(self._log)
        self._process, connection = start(
            self._path, "carrel.isolation.zygote", arguments, environment=environment, log_path=self._log
        )
        return connection

    def _open(self, connection: socket.socket) -> Channel:
        return Channel(connection, self._receive, self._lost)

    def _receive(self, answer: dict[str, Any], fds: list[int]) -> None:
        seq = answer.pop("seq", 0)
        waiting = [self._waiting.get(seq)] if seq else list(self._waiting.values())
        heard = [future for future in waiting if future is not None and not future.done()]
        for future in heard:
            future.set_result({**answer, "fds": fds} if fds else answer)
        if not heard:
            close_all(fds)

    def _lost(self) -> None:
        self._channel = None
        for future in self._waiting.values():
            if not future.done():
                future.set_result({"error": f"the zygote died; see {self._log}"})

    def _hang_up(self) -> None:
        if self._channel is not None:
            self._channel.close()

    async def close(self) -> None:
        """Disconnect. A zygote without sandboxes and other connections then ends by itself, and this waits for it."""
        description: dict[str, Any] = {}
        if self._channel is not None:
            with suppress(PlatformError):
                description = await self._ask(self._channel, "describe", (), {})
        if self._process is None and not description:
            return
        ends = not description.get("sandboxes") and description.get("connections", 1) == 1
        self._hang_up()
        if ends:
            if self._process is None:  # a server before this one started it, so it is not a child of this process
                await asyncio.get_running_loop().run_in_executor(None, wait_for_end, int(description["pid"]), 10)
            else:
                try:
                    await asyncio.get_running_loop().run_in_executor(None, self._process.wait, 10)
                except subprocess.TimeoutExpired:
                    self._process.send_signal(signal.SIGKILL)
                    self._process.wait()
            for path in (self._path, self._log):
                with suppress(FileNotFoundError):
                    os.unlink(path)
        elif self._process is not None:
            self._process.returncode = 0  # left alone on purpose
        self._process = None


def _answering(path: str) -> socket.socket:
    """Connect to a zygote that takes requests. One that is just ending accepts connections, but refuses this."""
    connection = connect(path)
    try:
        connection.settimeout(PROBE_S)
        connection.send(json.dumps({"seq": 1, "op": "describe"}).encode())
        if "error" in json.loads(connection.recv(MAX_MESSAGE)):
            raise ConnectionRefusedError
    except BaseException:
        connection.close()
        raise
    connection.setblocking(False)
    return connection
