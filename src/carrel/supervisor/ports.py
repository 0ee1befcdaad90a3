"""The servers that listen inside the sandbox: which ports they have, and a stream to one of them.

A stream is one request and its answer: the body of the request goes to the server, what the server sends is the body of
the answer. So nothing listens outside, and every provider can carry it. Bytes are not read here.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator

from carrel.errors import InvalidRequest, LimitExceeded, PortNotOpen
from carrel.primitives import tasks
from carrel.supervisor.http import HttpRequest, HttpResponse, HttpRouter, Json, json_response

MOST_OPEN = 384
"""Streams at a time; each is two descriptors."""
MOST_LISTED = 256
CONNECT_S = 5.0
LONGEST_WAIT_S = 300.0
_CHUNK = 256 * 1024
_MOST_READ = 4 * 1024 * 1024
"""Bytes of the kernel's tables that are read: a sandbox can open many sockets."""
_LISTENS = "0A"
_POLL_S, _LONGEST_POLL_S = 0.05, 0.5
"""Reading the table takes the kernel milliseconds, however many sockets there are here."""
_LOOPBACK = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))


class SandboxPorts:
    """The ports of one sandbox."""

    def __init__(self) -> None:
        self._reserved: frozenset[int] = frozenset()
        self._open = 0

    def routes(self, router: HttpRouter) -> None:
        router.add("GET", "/ports", self._list)
        router.add("POST", "/ports/{}/stream", self._stream)

    def configure(self, reserved: frozenset[int]) -> None:
        """Take charge of a sandbox. `reserved` are ports of carrel's own in it, which nobody reaches from outside."""
        self._reserved = reserved

    async def _list(self, request: HttpRequest) -> HttpResponse:
        """List the ports. With `port`, first wait until that one is open, at most `wait_ms`."""
        wanted = request.query.get("port")
        found = listening(self._reserved)
        if wanted is not None:
            port = _port(wanted)
            until = time.monotonic() + min(request.number("wait_ms", 0) / 1000, LONGEST_WAIT_S)
            pause = _POLL_S
            while port not in found and time.monotonic() < until:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_POLL_S)
                found = listening(self._reserved)
        shown: list[Json] = [{"port": port, "addresses": sorted(found[port])} for port in sorted(found)[:MOST_LISTED]]
        return json_response({"items": shown, "truncated": len(found) > len(shown)})

    async def _stream(self, request: HttpRequest) -> HttpResponse:
        port = _port(request.args[0])
        if port in self._reserved:
            raise PortNotOpen(f"port {port} is one of carrel's own in the sandbox", hint="use another port", port=port)
        if self._open >= MOST_OPEN:
            raise LimitExceeded(
                f"more than {MOST_OPEN} connections to ports of this sandbox", hint="wait until some of them end"
            )
        self._open += 1
        try:
            server = await _connect(port)
        except BaseException:
            self._open -= 1
            raise
        feeding = asyncio.get_running_loop().create_task(_feed(request, server))
        feeding.add_done_callback(lambda _: self._ended(server))
        return HttpResponse(stream=_answer(server, feeding), content_type=b"application/octet-stream")

    def _ended(self, server: socket.socket) -> None:
        self._open -= 1
        server.close()


async def _connect(port: int) -> socket.socket:
    """Connect to the server that listens on a port of this sandbox's loopback."""
    loop, refused = asyncio.get_running_loop(), True
    for family, host in _LOOPBACK:
        try:
            server = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        except OSError:  # no IPv6 here, or no descriptors are left
            continue
        try:
            async with asyncio.timeout(CONNECT_S):
                await loop.sock_connect(server, (host, port))
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return server
        except TimeoutError:  # its queue is full
            refused = False
            server.close()
        except OSError:
            server.close()
        except BaseException:
            server.close()
            raise
    if refused:
        raise PortNotOpen(
            f"nothing listens on port {port} in the sandbox",
            hint="start a server on 127.0.0.1 or 0.0.0.0 in the sandbox, and wait until it listens",
            port=port,
        )
    raise PortNotOpen(f"the server on port {port} accepts no connection", hint="it may be overloaded", port=port)


async def _feed(request: HttpRequest, server: socket.socket) -> None:
    """Send the body of the request to the server, then tell it that no more comes. The stream ends when both directions
    have ended: this task waits to be cancelled by the other one.
    """
    loop = asyncio.get_running_loop()
    try:
        async for chunk in request.chunks():
            await loop.sock_sendall(server, chunk)
        server.shutdown(socket.SHUT_WR)
    except ConnectionResetError:  # the caller has gone, or the server: neither direction goes on
        _shut(server)
    except OSError:  # the server reads no more; what it still sends is passed on
        pass
    except BaseException:
        _shut(server)
        raise
    await asyncio.get_running_loop().create_future()


def _shut(server: socket.socket) -> None:
    try:
        server.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


async def _answer(server: socket.socket, feeding: asyncio.Task[None]) -> AsyncIterator[bytes]:
    """Yield what the server sends. Its end is the end of the stream, also where it would still read."""
    loop = asyncio.get_running_loop()
    try:
        while data := await loop.sock_recv(server, _CHUNK):
            yield data
    finally:
        await tasks.cancel([feeding])


def _port(text: str) -> int:
    if text.isascii() and text.isdigit() and 0 < int(text[:6]) <= 65_535:
        return int(text)
    raise InvalidRequest("a port is a number from 1 to 65535", field="port")


def listening(reserved: frozenset[int] = frozenset()) -> dict[int, set[str]]:
    """Return the ports of this network namespace on which a server listens, with their addresses."""
    found: dict[int, set[str]] = {}
    for table, family in (("/proc/net/tcp", socket.AF_INET), ("/proc/net/tcp6", socket.AF_INET6)):
        for line in _read(table).split("\n")[1:]:
            fields = line.split(None, 4)
            if len(fields) > 3 and fields[3] == _LISTENS:
                address, _, port = fields[1].partition(":")
                number = int(port, 16)
                if number not in reserved:
                    found.setdefault(number, set()).add(_address(address, family))
    return found


def _address(text: str, family: int) -> str:
    """Return an address of the kernel's table: words of 32 bits in the order of the machine."""
    raw = b"".join(bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8))
    return socket.inet_ntop(family, raw)


def _read(path: str) -> str:
    parts, size = [], 0
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        while size < _MOST_READ and (part := os.read(descriptor, _CHUNK)):
            parts.append(part)
            size += len(part)
    except OSError:
        pass
    finally:
        os.close(descriptor)
    return b"".join(parts).decode("ascii", "replace")
