"""A Unix socket between two processes of this host that carries JSON messages with descriptors, both ways, in order;
and starting the process at its other end.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

log = logging.getLogger("carrel.channel")

MAX_MESSAGE = 192 * 1024
"""Send longer things as a file in memory."""
MAX_DESCRIPTORS = 4
_READ = 256 * 1024
_MAX_WAITING = 10_000

Message = dict[str, Any]
OnMessage = Callable[[Message, list[int]], None]
"""Is called with a message and its descriptors, which it then owns."""


class ChannelClosed(Exception):
    """The other side is gone."""


class Channel:
    """One end of the socket, for one event loop. `on_closed` is called once, when the other end is gone."""

    def __init__(self, connection: socket.socket, on_message: OnMessage, on_closed: Callable[[], None]):
        connection.setblocking(False)
        self._socket: socket.socket | None = connection
        self._on_message = on_message
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[bytes, list[int]]] = deque()
        self._loop.add_reader(connection, self._readable)

    @property
    def closed(self) -> bool:
        """Whether the channel can send no more."""
        return self._socket is None

    def send(self, message: Mapping[str, object], descriptors: Sequence[int] = ()) -> None:
        """Send a message now, or as soon as the other side reads. The descriptors stay the caller's.

        Raises `ChannelClosed`, also when the other side has stopped reading.
        """
        data = json.dumps(message).encode()
        if len(data) > MAX_MESSAGE:
            raise ValueError("the message is too long for the channel")
        if self._socket is None:
            raise ChannelClosed
        if self._waiting or not self._sent(data, descriptors):
            if len(self._waiting) >= _MAX_WAITING:
                self.close()
                raise ChannelClosed
            if not self._waiting:
                self._loop.add_writer(self._socket, self._writable)
            self._waiting.append((data, [os.dup(each) for each in descriptors]))
        if self._socket is None:
            raise ChannelClosed

    def close(self) -> None:
        """Close this end. Messages that were not sent yet are lost."""
        if self._socket is None:
            return
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._socket = None
        while self._waiting:
            close_all(self._waiting.popleft()[1])
        self._on_closed()

    def _sent(self, data: bytes, descriptors: Sequence[int]) -> bool:
        assert self._socket is not None
        try:
            if descriptors:
                socket.send_fds(self._socket, [data], list(descriptors))
            else:
                self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            self.close()
        return True

    def _writable(self) -> None:
        while self._waiting and self._socket is not None:
            data, descriptors = self._waiting[0]
            if not self._sent(data, descriptors):
                return
            if self._waiting:  # empty if sending closed the channel
                self._waiting.popleft()
                close_all(descriptors)
        if self._socket is not None:
            self._loop.remove_writer(self._socket)

    def _readable(self) -> None:
        while self._socket is not None:
            try:
                data, descriptors, _flags, _address = socket.recv_fds(self._socket, _READ, MAX_DESCRIPTORS)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data, descriptors = b"", []
            if not data:
                self.close()
                return
            for each in descriptors:  # `recv_fds` ignores the flag that would do this
                os.set_inheritable(each, False)
            try:
                message = json.loads(data)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                log.warning("the process at the other end of a channel sent something that is not a message")
                close_all(descriptors)
                self.close()
                return
            self._on_message(message, descriptors)


def connect(path: str) -> socket.socket:
    """Connect to the process that listens at `path`. Raises `OSError` when there is none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


def start(
    path: str, module: str, arguments: Sequence[str], *, environment: Mapping[str, str], log_path: str
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start `python -m module --listen-fd N arguments…` in its own session, listening at `path`, and connect to it.

    The socket is made here, so connecting cannot come too early. The process gets only the given environment: secrets
    of this process's environment must not reach it.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with suppress(FileNotFoundError):
            os.unlink(path)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(64)
        with open(log_path, "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, "--listen-fd", str(listener.fileno()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[listener.fileno()],
                env=environment,
                start_new_session=True,
            )
        return process, connect(path)
    finally:
        listener.close()


def wait_for_end(pid: int, seconds: float, *, kill: bool = False) -> bool:
    """Wait until a process has ended, child or not, and return whether it has. `kill` ends it after that time."""
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return True
    try:
        if select.select([process], [], [], seconds)[0]:
            return True
        if not kill:
            return False
        signal.pidfd_send_signal(process, signal.SIGKILL)
        return bool(select.select([process], [], [], seconds)[0])
    finally:
        os.close(process)


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors that came with a message."""
    for each in descriptors:
        os.close(each)
