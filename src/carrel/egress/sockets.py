"""Waits on raw sockets. Bytes can be looked at without being taken, so that a byte that was checked is still unread
when a tunnel begins.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from ipaddress import IPv6Address
from typing import TypeVar

from carrel.egress.access import Address

T = TypeVar("T")

IDLE_S = 15 * 60.0
"""A connection is ended when nothing moves on it for this long."""

FREE_LOOKS, PAUSE_S = 16, 0.02
"""After this many looks there is a pause before each: a head that arrives byte by byte must not cost a search for each.
"""
_SWEEP_S = 0.25
"""A wait may end this much later than its deadline."""
_ONCE = select.EPOLLIN | select.EPOLLONESHOT
_AT_ONCE = 256
_FIRST_LOOK = 8192
_DELIVERY_S, _DELIVERY_BYTES = 2.0, 4 << 20


class Ended(ConnectionError):
    """The peer ended the connection too early."""


class Undeliverable(ConnectionError):
    """The peer takes no more bytes. It may still have sent some."""


class _Waits:
    """The coroutines that wait for a descriptor to become readable, and their deadlines: one epoll and one timer for
    all.

    The loop's own `add_reader` makes nine system calls for a wait, this makes one; and a timer for each wait costs a
    new connection more than its verdict does. A wait ends a little after its deadline.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._poll = select.epoll()
        self._known: dict[
            int, weakref.ref[socket.socket]
        ] = {}  # closing a socket removes it from the epoll, but not from here
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._ends: dict[asyncio.Future[None], float] = {}
        self._sweeping = False
        loop.add_reader(self._poll.fileno(), self._ready)

    def until(self, future: asyncio.Future[None], patience_s: float) -> None:
        """Set the deadline of a wait."""
        self._ends[future] = self.loop.time() + patience_s
        if not self._sweeping:
            self._sweeping = True
            self.loop.call_later(_SWEEP_S, self._sweep)

    def forget(self, future: asyncio.Future[None]) -> None:
        """Remove the deadline of a wait."""
        self._ends.pop(future, None)

    def arm(self, connection: socket.socket, descriptor: int, future: asyncio.Future[None]) -> None:
        """End a wait when the socket becomes readable."""
        known = self._known.get(descriptor)
        if known is not None and known() is connection:
            self._poll.modify(descriptor, _ONCE)
        else:
            self._poll.register(descriptor, _ONCE)
            self._known[descriptor] = weakref.ref(connection)
        self._waiting[descriptor] = future

    def disarm(self, descriptor: int, future: asyncio.Future[None]) -> None:
        """Undo `arm`."""
        if self._waiting.get(descriptor) is future:
            del self._waiting[descriptor], self._known[descriptor]
            with suppress(OSError):  # closing has removed it already
                self._poll.unregister(descriptor)

    def _ready(self) -> None:
        for descriptor, _ in self._poll.poll(0, _AT_ONCE):
            future = self._waiting.pop(descriptor, None)
            if future is not None and not future.done():
                future.set_result(None)

    def _sweep(self) -> None:
        now = self.loop.time()
        for future in [future for future, ends in self._ends.items() if ends <= now]:
            if not future.done():
                future.set_exception(TimeoutError("the peer takes too long"))
        self._sweeping = bool(self._ends)
        if self._sweeping:
            self.loop.call_later(_SWEEP_S, self._sweep)


class _Here(threading.local):
    """The waits of the loop that runs in this thread. The loop owns them."""

    waits: weakref.ref[_Waits] | None = None


_here = _Here()


def _waits_of(loop: asyncio.AbstractEventLoop) -> _Waits:
    waits = None if _here.waits is None else _here.waits()
    if waits is None or waits.loop is not loop:
        waits = _Waits(loop)
        _here.waits = weakref.ref(waits)
    return waits


def prepare() -> None:
    """Create the epoll of this loop now, so that no wait fails later because there are too many open files."""
    _waits_of(asyncio.get_running_loop())


async def readable(connection: socket.socket, patience_s: float) -> None:
    """Wait until a socket is readable or has ended. Only one coroutine may wait for a socket. Raises `TimeoutError`."""
    loop, descriptor = asyncio.get_running_loop(), connection.fileno()
    future: asyncio.Future[None] = loop.create_future()
    waits = _waits_of(loop)
    waits.arm(connection, descriptor, future)
    waits.until(future, patience_s)
    try:
        await future
    except BaseException:
        waits.disarm(descriptor, future)
        raise
    finally:
        waits.forget(future)


async def writable(connection: socket.socket, patience_s: float) -> None:
    """Wait until a socket is writable. Raises `TimeoutError`."""
    loop, descriptor = asyncio.get_running_loop(), connection.fileno()
    future: asyncio.Future[None] = loop.create_future()
    waits = _waits_of(loop)
    waits.until(future, patience_s)
    loop.add_writer(descriptor, _wake, future)
    try:
        await future
    finally:
        loop.remove_writer(descriptor)
        waits.forget(future)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def connect(address: Address, port: int, patience_s: float = IDLE_S) -> socket.socket:
    """Connect to an address. Raises `OSError`, `TimeoutError`.

    The loop's own `sock_connect` would look the address up in a thread.
    """
    family = socket.AF_INET6 if isinstance(address, IPv6Address) else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        where = (str(address), port)
        failure = connection.connect_ex(where)
        if failure == errno.EINPROGRESS:
            failure = connection.connect_ex(where)  # a peer on this host has answered by now
        if failure == errno.EALREADY:
            await writable(connection, patience_s)
            failure = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failure:
            raise OSError(failure, os.strerror(failure))
    except BaseException:
        connection.close()
        raise
    return connection


async def look(
    connection: socket.socket, read: Callable[[bytes], T | None], most: int, patience_s: float, *, later: bool = False
) -> T:
    """Call `read` with the unread bytes of the peer until it returns something. Takes no bytes.

    `later`: the peer was asked just now, so nothing can be there yet. Raises `TimeoutError`, and `Ended` when no more
    bytes will come or `most` bytes are not enough.
    """
    loop = asyncio.get_running_loop()
    ends = loop.time() + patience_s
    seen = looks = 0
    size = min(most, _FIRST_LOOK)
    if later:
        await readable(connection, patience_s)
    try:
        while True:
            try:
                data = connection.recv(size, socket.MSG_PEEK)
            except BlockingIOError:
                await readable(connection, ends - loop.time())
                continue
            if len(data) == seen:
                # The last bytes may have arrived between the look and the end.
                if has_ended(connection) and len(connection.recv(size, socket.MSG_PEEK)) == seen:
                    raise Ended("the peer has ended")
                # With a small buffer the kernel wakes for fewer bytes than asked for: this is not the end.
                await asyncio.sleep(PAUSE_S)
                if loop.time() >= ends:
                    raise TimeoutError("the peer takes too long")
                continue
            found = read(data)
            if found is not None:
                return found
            if len(data) == size < most:
                size = most
                continue
            seen, looks = len(data), looks + 1
            if seen >= most:
                raise Ended("the peer has sent too much")
            # Wake only for more bytes than were seen, or for the end.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, seen + 1)
            if looks > FREE_LOOKS:
                await asyncio.sleep(PAUSE_S)
            await readable(connection, ends - loop.time())
    finally:
        if seen:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


def has_ended(connection: socket.socket) -> bool:
    """Whether the peer will send nothing after the bytes that are unread."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))


def take(connection: socket.socket, size: int) -> bytes:
    """Take bytes that were looked at."""
    data = connection.recv(size)
    while len(data) < size:
        data += connection.recv(size - len(data))
    return data


async def send(connection: socket.socket, data: bytes) -> None:
    """Send all bytes. Raises `TimeoutError` when the peer takes none for too long."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[connection.send(rest) :]
        except BlockingIOError:
            await writable(connection, IDLE_S)


async def close_after_delivery(connection: socket.socket) -> None:
    """End a connection so that the peer receives the last bytes: for a moment, what it still sends is thrown away,
    because closing a socket with unread bytes resets the connection.
    """
    with suppress(OSError, TimeoutError):
        connection.shutdown(socket.SHUT_WR)
        left, loop = _DELIVERY_BYTES, asyncio.get_running_loop()
        ends = loop.time() + _DELIVERY_S
        while left > 0 and loop.time() < ends:
            try:
                thrown = len(connection.recv(65536))
            except BlockingIOError:
                await readable(connection, ends - loop.time())
                continue
            if not thrown:
                return
            left -= thrown
