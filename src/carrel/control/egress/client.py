"""The client of the egress process: starts it, finds it again after a restart of the server, and exchanges messages."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress

from carrel.egress.plan import VERSION
from carrel.errors import PlatformError
from carrel.primitives.channel import Channel, ChannelClosed, Message, close_all, connect, start, wait_for_end
from carrel.primitives.process_locks import LocksOf
from carrel.threads import run_to_end

log = logging.getLogger("carrel.egress")

_ANSWER_S = 15.0
_END_S = 10.0
_PASSED_ON = [
    "PATH", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "PIP_CERT",
    "PIP_PROXY", "PIP_CONFIG_FILE", "HOME", "XDG_CONFIG_HOME", "XDG_CONFIG_DIRS", "HTTP_PROXY", "HTTPS_PROXY",
    "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy",
]  # fmt: skip
"""The environment variables that Python needs, and those that configure how this host gets packages."""


class EgressClient:
    """The egress process, started on first use and again whenever it has died. For one event loop.

    `on_message` is called with the messages that are not answers; `on_down` is called when the process is gone.
    """

    def __init__(
        self,
        run_dir: str,
        arguments: Sequence[str],
        *,
        on_message: Callable[[Message], None],
        on_down: Callable[[], None],
        locks: LocksOf,
        last: bool,
    ):
        """`locks` keep two workers from starting a process each; `last` as for the service."""
        self._locks = locks
        self._last = last
        self._path = os.path.join(run_dir, "egress.sock")
        self._log = os.path.join(run_dir, "egress.log")
        self._state = os.path.join(run_dir, "egress")
        self._arguments = ["--state", self._state, *arguments]
        self._on_message = on_message
        self._on_down = on_down
        self._channel: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._lock = asyncio.Lock()

    @property
    def pid(self) -> int:
        """The pid of the process; 0 when there is none."""
        return self._pid if self.up else 0

    @property
    def up(self) -> bool:
        """Whether the process can be reached."""
        return self._channel is not None and not self._channel.closed

    def left_behind(self) -> bool:
        """Whether an earlier server may have left a process running."""
        return os.path.lexists(self._path)

    async def connect(self) -> list[str]:
        """Connect to the process, or start one; return the sandboxes that it serves already."""
        async with self._lock:
            if self.up:
                return []
            async with self._locks("egress process"):
                description = await self._known()
                if description is None:
                    # A cancelled caller waits for the start too: otherwise a second process could be started beside it.
                    self._open(await run_to_end(self._spawn, socket.socket.close))
                    description = await self.request("describe")
            self._pid = int(description["pid"])
            return [str(each) for each in description["sandboxes"]]

    async def request(self, op: str, fds: Sequence[int] = (), **body: object) -> Message:
        """Send a request and wait for the answer. Raises `PlatformError`."""
        number = next(self._numbers)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self.send(op, fds, seq=number, **body)
            async with asyncio.timeout(_ANSWER_S):
                answer = await future
        except ChannelClosed:
            raise PlatformError("the egress process is gone", hint="it is being started again; try again") from None
        except TimeoutError:
            raise PlatformError(f"the egress process did not answer '{op}' in time", hint=f"see {self._log}") from None
        finally:
            self._waiting.pop(number, None)
        if answer.get("op") == "failed":
            raise PlatformError(f"the egress process refused '{op}': {answer.get('error')}", hint=f"see {self._log}")
        return answer

    def send(self, op: str, fds: Sequence[int] = (), **body: object) -> None:
        """Send a message without an answer. Raises `ChannelClosed`."""
        if self._channel is None:
            raise ChannelClosed
        self._channel.send({"op": op, **body}, fds)

    async def close(self) -> None:
        """End the process, also one that an earlier server started; disconnect if others use it."""
        if not self._last:
            if self._channel is not None:
                self._channel.close()
            return
        async with self._lock:
            if self.up or await self._known() is not None:
                with suppress(ChannelClosed):
                    self.send("drain", seconds=0)
                await asyncio.to_thread(self._wait)
            else:
                await asyncio.to_thread(self._reap)
            for path in (self._path, self._log):
                with suppress(FileNotFoundError):
                    os.unlink(path)
            with suppress(OSError):  # the journal stays if it holds unwritten accesses
                os.rmdir(self._state)
        if self._channel is not None:
            self._channel.close()

    async def _known(self) -> Message | None:
        """Connect to a process that an earlier server started and return its description; None when there is none to
        use.
        """
        try:
            connection = connect(self._path)
        except OSError:
            return None
        self._open(connection)
        try:
            description = await self.request("describe")
        except PlatformError:
            if self._channel is not None:
                self._channel.close()
            return None
        if description.get("version") == VERSION:
            self._pid = int(description["pid"])
            return description
        with suppress(ChannelClosed):
            self.send("drain")
        return None

    def _open(self, connection: socket.socket) -> None:
        holder: list[Channel] = []
        self._channel = Channel(connection, self._receive, lambda: self._gone(holder))
        holder.append(self._channel)

    def _gone(self, channel: list[Channel]) -> None:
        if channel and channel[0] is not self._channel:
            return
        self._channel = None
        for future in self._waiting.values():
            if not future.done():
                future.set_result({"op": "failed", "error": "it is gone"})
        self._on_down()

    def _receive(self, message: Message, fds: list[int]) -> None:
        close_all(fds)
        if message.get("op") in {"done", "failed"}:
            future = self._waiting.get(message.get("seq", 0))
            if future is not None and not future.done():
                future.set_result(message)
            return
        self._on_message(message)

    def _spawn(self) -> socket.socket:
        self._reap(0.5)
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        environment |= {"LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "2"}
        self._process, connection = start(
            self._path, "carrel.egress", self._arguments, environment=environment, log_path=self._log
        )
        return connection

    def _wait(self) -> None:
        """Wait for the end of the process; kill it when it takes too long."""
        wait_for_end(self._pid, _END_S, kill=True)
        self._reap()

    def _reap(self, patience_s: float = _END_S) -> None:
        """Wait for the process that this server started, and its keeper; kill them when they take too long."""
        if self._process is None:
            return
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            log.warning("the egress process does not answer and is killed")
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(_END_S)
        self._process = None
