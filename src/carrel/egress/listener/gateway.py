"""Accepts the connections of one sandbox from its listening socket, and finds out what each wants and for which target.

The socket is in the sandbox's own network, or a Unix socket that only this sandbox can see. It is its identity. Nothing
that a client sends is forwarded before it was checked, and a connection that fails affects no other.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import socket
from contextlib import suppress
from functools import lru_cache
from typing import Literal

from carrel.egress.access import Access, AccessRefused, BadRequest, Target
from carrel.egress.copying import copy, tunnel
from carrel.egress.http import answers, messages
from carrel.egress.http.relay import Relay, Tunnel
from carrel.egress.http.streams import HEAD_S, SocketStream
from carrel.egress.listener import first_bytes
from carrel.egress.listener.first_bytes import Hello
from carrel.egress.outbound.budget import Meter
from carrel.egress.outbound.connections import Outbound
from carrel.egress.outbound.names import read_authority
from carrel.egress.sockets import Ended, close_after_delivery, look, prepare, send, take

log = logging.getLogger("carrel.egress")

SILENT_S = 15.0
"""How long a client may take to begin the TLS or HTTP inside a tunnel."""
ANSWER_S = 60.0
"""How long a server may take to answer a TLS hello."""

_AT_ONCE, _CLOSE_S = 128, 0.05
_BEYOND = 64
"""Connections above the limit that are accepted, to be refused with a reason. More wait in the socket's queue."""
_PAUSE_S = 0.2
_SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_SHORT = 1024
_ANSWER = 64  # enough bytes of a server's first record
_METHOD = re.compile(rb"[A-Z]{1,20}( |$)")

First = Literal["socks"] | int
"""SOCKS, or the size of a request's head."""
Opening = Hello | int
"""The beginning of a tunnel: a TLS hello, or the size of a request's head."""


def _configure(listener: socket.socket) -> None:
    listener.setblocking(False)
    if listener.family != socket.AF_UNIX:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it
        # Clients speak first: the kernel keeps a connection until bytes arrive.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, int(HEAD_S))


class Gateway:
    """Accepts and serves the connections of one sandbox. Owns the listening socket."""

    def __init__(self, listener: socket.socket, outbound: Outbound):
        _configure(listener)
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        prepare()
        self._outbound = outbound
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting = False
        self._closed = False
        self._retry: asyncio.TimerHandle | None = None
        self._at_once = 1
        self._last = 0.0

    def start(self) -> None:
        """Start to accept connections."""
        if not self._accepting and not self._closed:
            self._accepting = True
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def listen_on(self, listener: socket.socket) -> None:
        """Accept on this socket from now on, not on the earlier one. Both descriptors may be of one socket."""
        if os.fstat(listener.fileno()).st_ino == os.fstat(self._listener.fileno()).st_ino:
            listener.close()
            return
        _configure(listener)
        accepting = self._accepting
        self._pause()
        self._listener.close()
        self._listener = listener
        if accepting:
            self.start()

    async def drain(self, seconds: float) -> None:
        """Accept no more connections, let the open ones run for `seconds`, then end them."""
        self._pause()
        self._closed = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        self.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def close(self) -> None:
        """End everything at once. The accesses that are cut are reported when the event loop continues."""
        self._pause()
        self._closed = True
        self._listener.close()
        for task in self._tasks:
            task.cancel()

    def _pause(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._accepting:
            self._accepting = False
            self._loop.remove_reader(self._listener.fileno())

    # connections

    def _accept(self) -> None:
        """Accept waiting connections: one, or twice as many as last time when they arrive faster than they end.
        Otherwise the socket's queue would overflow.
        """
        now = self._loop.time()
        self._at_once = min(_AT_ONCE, self._at_once * 2) if self._tasks and now - self._last < _CLOSE_S else 1
        self._last = now
        for _ in range(self._at_once):
            if not self._accept_one():
                return

    def _accept_one(self) -> bool:
        if len(self._tasks) >= self._outbound.budget.connections + _BEYOND:
            self._pause()  # until one has ended
            return False
        try:
            client, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return False
        except OSError as error:
            self._pause()
            log.warning("sandbox %s: no connection can be taken: %s", self._outbound.plan.sandbox, error)
            if error.errno in _SCARCE:
                self._retry = self._loop.call_later(_PAUSE_S, self.start)
            return False
        task = self._loop.create_task(self._serve(client))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return True

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._retry is None:
            self.start()

    async def _serve(self, client: socket.socket) -> None:
        try:
            client.setblocking(False)
            await self._dispatch(client)
        except (ConnectionError, TimeoutError):
            pass  # the client is gone or silent
        except Exception:
            log.exception("sandbox %s: a connection failed", self._outbound.plan.sandbox)
        finally:
            client.close()

    async def _dispatch(self, client: socket.socket) -> None:
        try:
            first: First = await look(client, _first, messages.MOST, HEAD_S)
        except AccessRefused as refusal:
            self._outbound.refuse(Access(self._outbound.plan.sandbox, "http"), refusal)
            await _send_last(client, answers.refusal(refusal))
            return
        if first == "socks":
            await self._serve_socks(client)
            return
        head = take(client, first)
        if head.startswith(b"CONNECT "):
            await self._serve_connect(client, head)
        else:
            await Relay(SocketStream(client, head), self._outbound).serve()

    async def _serve_connect(self, client: socket.socket, head: bytes) -> None:
        access = Access(self._outbound.plan.sandbox, "connect", method="CONNECT")
        try:
            target = _connect_target(head)
        except AccessRefused as refusal:
            self._outbound.refuse(access, refusal)
            await _send_last(client, answers.refusal(refusal))
            return
        await self._tunnel(client, access, target)

    async def _serve_socks(self, client: socket.socket) -> None:
        access = Access(self._outbound.plan.sandbox, "socks5")
        size, accepted = await look(client, first_bytes.read_socks_greeting, first_bytes.MOST_SOCKS, HEAD_S)
        take(client, size)
        if not accepted:
            await _send_last(client, first_bytes.SOCKS_NO_METHOD)
            return
        await send(client, first_bytes.SOCKS_NO_AUTHENTICATION)
        request = await look(client, first_bytes.read_socks_request, first_bytes.MOST_SOCKS, HEAD_S)
        take(client, request.size)
        if request.target is not None:
            await self._tunnel(client, access, request.target)
        elif request.refusal is not None:
            self._outbound.refuse(access, request.refusal)
            await _send_last(client, first_bytes.socks_reply(request.code))

    # tunnels

    async def _tunnel(self, client: socket.socket, access: Access, target: Target) -> None:
        by_socks = access.protocol == "socks5"
        try:
            upstream = await self._open(access, target)
        except AccessRefused as refusal:
            answer = first_bytes.socks_reply(answers.socks_code(refusal)) if by_socks else answers.refusal(refusal)
            await _send_last(client, answer)
            return
        try:
            await send(client, first_bytes.socks_reply(0) if by_socks else answers.CONNECTED)
            await self._forward(client, upstream, access, target)
        except AccessRefused as refusal:
            self._outbound.close(access, refusal)
            upstream.close()
            await close_after_delivery(client)
        except BaseException as error:
            self._outbound.close(access, error)
            raise
        finally:
            upstream.close()
            self._outbound.close(access)

    async def _open(self, access: Access, target: Target) -> socket.socket:
        try:
            return await self._outbound.open(access, target)
        except (AccessRefused, asyncio.CancelledError):
            raise
        except Exception:
            log.exception("sandbox %s: a connection could not be made", self._outbound.plan.sandbox)
            raise answers.failed() from None

    async def _forward(self, client: socket.socket, upstream: socket.socket, access: Access, target: Target) -> None:
        """Forward a tunnel, once the client has named the target inside it. A refused client has got an answer."""
        outbound = self._outbound
        inspected = outbound.rules.inspected(target)
        if not inspected and outbound.rules.opaque(target):
            await _copy(client, upstream, outbound.meter(access))
            return
        try:
            greeting = await self._first_bytes(client, target)
            if isinstance(greeting, Hello) and not inspected:
                await self._forward_hello(client, upstream, target, greeting, outbound.meter(access))
        except AccessRefused as refusal:
            with suppress(OSError):
                await send(client, answers.alert(refusal))
            raise
        if isinstance(greeting, int):
            stream = SocketStream(client, take(client, greeting))
            await Relay(stream, outbound, Tunnel(target, access, SocketStream(upstream))).serve()
        elif inspected:
            access.inspected = True
            await outbound.inspect(client, upstream, target, outbound, access)
        else:
            await _copy(client, upstream, outbound.meter(access))

    async def _first_bytes(self, client: socket.socket, target: Target) -> Opening:
        """Wait for the first bytes in a tunnel: a TLS hello that names the target, or a request in the clear."""
        try:
            found: Opening = await look(client, _opening, first_bytes.MOST_HELLO, SILENT_S, later=True)
        except TimeoutError:
            raise _unnamed(target, "says nothing") from None
        except first_bytes.NotTls:
            raise _unnamed(target, "speaks neither TLS nor HTTP") from None
        if not isinstance(found, int):
            _check(found, target)
        return found

    async def _forward_hello(
        self, client: socket.socket, upstream: socket.socket, target: Target, first: Hello, meter: Meter
    ) -> None:
        """Forward a hello that was checked, and nothing after it until the server has answered: the server may ask for
        another hello and use the name in that one. The second hello is checked too.
        """
        meter.sent(first.size)
        await send(upstream, take(client, first.size))
        try:
            asking = await look(upstream, first_bytes.wants_another, _ANSWER, ANSWER_S, later=True)
        except Ended:
            return  # the tunnel passes the end on
        if not asking:
            return
        await copy(upstream, client, meter.received, most=asking)
        try:
            _check(await look(client, first_bytes.read_second, first_bytes.MOST_HELLO, SILENT_S, later=True), target)
        except TimeoutError:
            raise _unnamed(target, "says nothing") from None


async def _copy(client: socket.socket, upstream: socket.socket, meter: Meter) -> None:
    await tunnel(client, upstream, meter.sent, meter.received)


def _first(data: bytes) -> First | None:
    return "socks" if data[0] == first_bytes.SOCKS_VERSION else messages.end_of(data)


def _opening(data: bytes) -> Opening | None:
    """Read the beginning of a tunnel. Raises `NotTls` for anything but TLS and HTTP, and `Malformed`."""
    method = _METHOD.match(data)
    if method is None:
        return first_bytes.read_hello(data)
    return messages.end_of(data) if method[1] else None


def _check(found: Hello, target: Target) -> None:
    """Raise `AccessRefused` when a hello is not for the target, or does not name one."""
    if found.encrypted:
        raise _unnamed(target, "encrypts the name it is for")
    if target.literal is None and found.name is None:
        raise _unnamed(target, "has no name in its TLS hello")
    if found.name != (None if target.literal is not None else target.host):
        raise AccessRefused(
            f"the tunnel is for {target}, and the TLS inside it is for {found.name}",
            status=421,
            hint="open a tunnel for each host",
        )


def _connect_target(head: bytes) -> Target:
    """Return the target of a CONNECT. Raises `AccessRefused`."""
    return _known_target(head) if len(head) <= _SHORT else _read_target(head)


def _read_target(head: bytes) -> Target:
    request = messages.read_request(head)
    target = read_authority(request.target, None)
    for host in request.all(b"host"):
        if read_authority(host, target.port) != target:
            raise BadRequest("CONNECT and its Host header name different hosts")
    return target


# A program opens many tunnels with the same head.
_known_target = lru_cache(1024)(_read_target)


def _unnamed(target: Target, what: str) -> AccessRefused:
    return AccessRefused(
        f"the connection to {target} {what}, so its target cannot be checked",
        hint="the operator can name the host in web_access.opaque_domains",
    )


async def _send_last(client: socket.socket, data: bytes) -> None:
    with suppress(OSError, Ended):
        await send(client, data)
        await close_after_delivery(client)
