"""The socket between the control plane and the proxy: messages with descriptors, both ways, in order.

What goes over it, said by the control plane: `attach`, `change` and `detach` a sandbox, `answer` to a question, `ack`
of what was logged, `describe`, `drain`. Said by the proxy: `done` or `failed` for each of these that has a number,
`ask`, `log`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

log = logging.getLogger("carrel.egress")

VERSION = 2
"""Of the messages: a control plane of another version drains the proxy it finds and starts its own."""
MAX_MESSAGE = 192 * 1024
"""Longer things travel in memory files."""
_MOST_FDS = 4
_MOST_WAITING = 10_000

Message = dict[str, Any]
OnMessage = Callable[[Message, list[int]], None]
"""Is given a message and its descriptors, which it then owns."""


class ChannelClosed(Exception):
    """The other side is gone."""


class Channel:
    """One end. For one event loop; `on_closed` is called once, when the other end is gone."""

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
        """Whether nothing can be sent any more."""
        return self._socket is None

    def send(self, message: Mapping[str, object], fds: Sequence[int] = ()) -> None:
        """Send a message as soon as the other side takes it. The descriptors stay the caller's. Raises
        `ChannelClosed`, also when the other side does not read any more.
        """
        data = json.dumps(message).encode()
        if len(data) > MAX_MESSAGE:
            raise ValueError("the message is too long for the channel")
        if self._socket is None:
            raise ChannelClosed
        if self._waiting or not self._sent(data, fds):
            if len(self._waiting) >= _MOST_WAITING:
                self.close()
                raise ChannelClosed
            if not self._waiting:
                self._loop.add_writer(self._socket, self._writable)
            self._waiting.append((data, [os.dup(each) for each in fds]))
        if self._socket is None:
            raise ChannelClosed

    def close(self) -> None:
        """Hang up."""
        if self._socket is None:
            return
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._socket = None
        while self._waiting:
            for each in self._waiting.popleft()[1]:
                os.close(each)
        self._on_closed()

    def _sent(self, data: bytes, fds: Sequence[int]) -> bool:
        assert self._socket is not None
        try:
            socket.send_fds(self._socket, [data], list(fds)) if fds else self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            self.close()
        return True

    def _writable(self) -> None:
        while self._waiting and self._socket is not None:
            data, fds = self._waiting[0]
            if not self._sent(data, fds):
                return
            if self._waiting:  # else it was closed just now
                self._waiting.popleft()
                for each in fds:
                    os.close(each)
        if self._socket is not None:
            self._loop.remove_writer(self._socket)

    def _readable(self) -> None:
        while self._socket is not None:
            try:
                data, fds, _flags, _address = socket.recv_fds(self._socket, MAX_MESSAGE, _MOST_FDS)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data, fds = b"", []
            if not data:
                self.close()
                return
            for each in fds:
                os.set_inheritable(each, False)
            try:
                message = json.loads(data)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                log.warning("the other side of the egress channel sent what is no message")
                for each in fds:
                    os.close(each)
                self.close()
                return
            self._on_message(message, fds)


def memory_file(data: bytes) -> int:
    """A descriptor of a file in memory that holds this."""
    descriptor = os.memfd_create("carrel-plan", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(data)
        os.lseek(descriptor, 0, os.SEEK_SET)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def content(descriptor: int) -> bytes:
    """What such a file holds; the descriptor is closed."""
    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)
        return file.read()
