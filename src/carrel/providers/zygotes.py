"""The control plane's end of a zygote: starts it, finds it again after a restart, asks it for sandboxes."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from carrel.errors import PlatformError, ProviderUnavailable

MAX_MESSAGE = 256 * 1024
MAX_DESCRIPTORS = 4
START_DEADLINE_S = 30.0
SUPERVISOR = "carrel.supervisor.app"


class ZygoteClient:
    """One zygote, started on first use and again when it has died. For one event loop."""

    def __init__(self, run_dir: str, workspaces: str, *, plain: bool, shared: Mapping[str, str] = MappingProxyType({})):
        self._name = "plain" if plain else "namespace"
        self._path = os.path.join(run_dir, f"zygote-{self._name}.sock")
        self._log = os.path.join(run_dir, f"zygote-{self._name}.log")
        self._workspaces = workspaces
        self._plain = plain
        self._shared = dict(shared)
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._seq = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._lock: asyncio.Lock | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.description: dict[str, Any] = {}

    async def request(self, op: str, fds: tuple[int, ...] = (), **body: Any) -> dict[str, Any]:
        """Ask, and wait for the answer. Raises `PlatformError` with the zygote's own words."""
        connection = self._socket or await self._connect()
        return await self._ask(connection, op, fds, body)

    async def known(self, op: str, **body: Any) -> dict[str, Any]:
        """Ask a zygote that may be gone; an empty answer when it is."""
        self._lock = self._lock or asyncio.Lock()
        async with self._lock:  # one that is being started takes connections already, and there is to be one
            if self._socket is None:
                try:
                    self._open(await self._reach())
                except OSError:
                    return {}
        assert self._socket is not None
        try:
            return await self._ask(self._socket, op, (), body)
        except PlatformError:
            return {}

    async def descriptor(self, op: str, **body: Any) -> int | None:
        """Ask a zygote that may be gone for a descriptor, which is then the caller's to close."""
        fds: list[int] = (await self.known(op, **body)).get("fds", [])
        return fds[0] if fds else None

    async def _ask(
        self, connection: socket.socket, op: str, fds: tuple[int, ...], body: dict[str, Any]
    ) -> dict[str, Any]:
        self._seq += 1
        seq = self._seq
        message = json.dumps({"seq": seq, "op": op, **body}).encode()
        if len(message) > MAX_MESSAGE // 2:
            raise PlatformError("the request to start a sandbox is too large", hint="pass a smaller environment")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._waiting[seq] = future
        try:
            while True:
                try:
                    socket.send_fds(connection, [message], fds)
                    break
                except BlockingIOError:
                    await asyncio.sleep(0.001)
                except OSError as error:
                    self._lost()
                    raise PlatformError(f"the zygote is gone: {error}") from error
            async with asyncio.timeout(START_DEADLINE_S * 2):
                answer = await future
        except BaseException as error:
            if future.done() and not future.cancelled():  # answered, but nobody waits any more
                close_descriptors(future.result())
            if isinstance(error, TimeoutError):
                raise PlatformError(f"the zygote did not answer '{op}' in time") from None
            raise
        finally:
            self._waiting.pop(seq, None)
        if "error" in answer:
            close_descriptors(answer)
            raise PlatformError(str(answer["error"]))
        return answer

    async def _connect(self) -> socket.socket:
        self._lock = self._lock or asyncio.Lock()
        async with self._lock:
            if self._socket is not None:
                return self._socket
            try:  # one that is just ending still takes connections, but does not describe itself
                connection = await self._reach()
                return await self._greet(connection)
            except (OSError, PlatformError):
                self._hang_up()
            connection = await asyncio.get_running_loop().run_in_executor(None, self._spawn)
            try:
                return await self._greet(connection)
            except PlatformError as error:
                self._hang_up()
                raise ProviderUnavailable(
                    f"the {self._name} zygote did not start: {error.detail}",
                    hint=f"see {self._log}; run `carrel doctor`",
                ) from error

    async def _greet(self, connection: socket.socket) -> socket.socket:
        self._open(connection)
        self.description = await self._ask(connection, "describe", (), {})
        return connection

    async def _reach(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            connection.connect(self._path)
        except OSError:
            connection.close()
            raise
        return connection

    def _spawn(self) -> socket.socket:
        """Start a zygote on a listener made here, so that connecting to it cannot be too early."""
        if self._process is not None:  # the one before, which has died
            try:
                self._process.wait(1)
            except subprocess.TimeoutExpired:
                self._process.returncode = 0  # it does not listen, but may still have sandboxes: not ours to end
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            if os.path.lexists(self._path):
                os.unlink(self._path)
            listener.bind(self._path)
            os.chmod(self._path, 0o600)
            listener.listen(64)
            arguments = ["--listen-fd", str(listener.fileno()), "--workspaces", self._workspaces]
            arguments += ["--supervisor", SUPERVISOR, *(["--plain"] if self._plain else [])]
            for target, source in self._shared.items():
                arguments += ["--share", f"{target}={source}"]
            # Secrets of the control plane's environment must not reach it: it gets the few names it needs.
            env = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
            env |= {"LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1", "MALLOC_ARENA_MAX": "1"}
            with open(self._log, "wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "carrel.isolation.zygote", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[listener.fileno()],
                    env=env,
                    start_new_session=True,
                )
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
            connection.connect(self._path)
            return connection
        finally:
            listener.close()

    def _open(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection, self._readable)

    def _readable(self) -> None:
        while self._socket is not None:
            try:
                message, fds, _flags, _address = socket.recv_fds(self._socket, MAX_MESSAGE, MAX_DESCRIPTORS)
            except BlockingIOError:
                return
            except OSError:
                message, fds = b"", []
            if not message:
                self._lost()
                return
            for descriptor in fds:  # `recv_fds` does not pass on the flag for it
                os.set_inheritable(descriptor, False)
            answer = json.loads(message)
            seq = answer.pop("seq", 0)
            waiting = [self._waiting.get(seq)] if seq else list(self._waiting.values())
            heard = [future for future in waiting if future is not None and not future.done()]
            for future in heard:
                future.set_result({**answer, "fds": fds} if fds else answer)
            if not heard:
                close_descriptors({"fds": fds})

    def _lost(self) -> None:
        self._hang_up()
        for future in self._waiting.values():
            if not future.done():
                future.set_result({"error": f"the zygote died; see {self._log}"})

    def _hang_up(self) -> None:
        if self._socket is not None and self._loop is not None:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._socket = None

    async def close(self) -> None:
        """Hang up. A zygote that has neither sandboxes nor other connections then ends by itself, and is waited for."""
        description: dict[str, Any] = {}
        if self._socket is not None:
            try:
                description = await self._ask(self._socket, "describe", (), {})
            except PlatformError:
                pass
        if self._process is None and not description:
            return
        # One that a server before this one started is no child of ours, so its end is seen through a descriptor.
        ends = not description.get("sandboxes") and description.get("connections", 1) == 1
        watched = _watch(int(description.get("pid", 0))) if ends and self._process is None else -1
        self._hang_up()
        if ends:
            if self._process is None:
                await asyncio.get_running_loop().run_in_executor(None, _wait, watched, 10)
            else:
                try:
                    await asyncio.get_running_loop().run_in_executor(None, self._process.wait, 10)
                except subprocess.TimeoutExpired:
                    self._process.send_signal(signal.SIGKILL)
                    self._process.wait()
            for path in (self._path, self._log):
                try:
                    os.unlink(path)
                except FileNotFoundError:
                    pass
        elif self._process is not None:
            self._process.returncode = 0  # left alone on purpose
        self._process = None


def close_descriptors(answer: dict[str, Any]) -> None:
    """Close what came with an answer."""
    for descriptor in answer.get("fds", ()):
        os.close(descriptor)


def _watch(pid: int) -> int:
    """A descriptor that tells the end of a process; -1 when it is gone."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def _wait(process: int, seconds: float) -> None:
    if process >= 0:
        try:
            select.select([process], [], [], seconds)
        finally:
            os.close(process)
