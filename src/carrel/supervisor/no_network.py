"""Explains to the tools in a sandbox without a network that there is none, and how to get one.

At the address where other sandboxes have the proxy, the supervisor listens and refuses every request. Without this,
tools look up a name, fail, try again for many seconds and then report a DNS error.

The requests are hostile input: there are at most `MOST_OPEN` connections at a time, each for at most `DEADLINE_S`
seconds and `MOST_HEAD` bytes. The only part of a request that is used is the name of the package that `pip` asks for.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket

REASON = "this sandbox has no network"
HINT = "start the sandbox with network='allowlist', or let its policy allow hosts"
MOST_OPEN = 64
MOST_HEAD = 64 * 1024
DEADLINE_S = 10.0

_STATUS = f"HTTP/1.1 403 Forbidden ({REASON}: start it with network='allowlist')"
_REFUSAL = {
    "code": "denied_by_policy",
    "operation": "network",
    "rule": None,
    "source": "network: none",
    "reason": REASON,
    "retry": False,
    "approval": None,
    "hint": HINT,
    # The names of RFC 9457, which uv shows to its users.
    "title": "Forbidden",
    "status": 403,
    "detail": f"{REASON}: {HINT}",
}
_SOCKS, _SOCKS_REFUSED = 5, b"\x05\xff"
_PACKAGE_PAGE = re.compile(rb"GET /simple/([A-Za-z0-9._-]{1,200})/? HTTP/1\.[01]\r\n")
_VERSION = "0+this.sandbox.has.no.network"


def answer(head: bytes) -> bytes:
    """Return the whole answer to a request that begins with `head`."""
    if head[:1] == bytes((_SOCKS,)):
        return _SOCKS_REFUSED
    if asked := _PACKAGE_PAGE.match(head):
        return _package_page(asked[1].decode())
    body = json.dumps(_REFUSAL).encode() + b"\n"
    sent = b"" if head.startswith(b"HEAD ") else body
    return _response(_STATUS, "application/problem+json", len(body)) + sent


def _package_page(project: str) -> bytes:
    """Return a page with one file, which is then refused. If the page itself were refused, `pip` would only say that
    there is no such package; for a file it prints the refusal, or at least the version.
    """
    name = f"{project}-{_VERSION}.tar.gz"
    body = f'<!DOCTYPE html><html><body><a href="/files/{name}">{name}</a></body></html>\n'.encode()
    return _response("HTTP/1.1 200 OK", "text/html; charset=utf-8", len(body)) + body


def _response(status: str, kind: str, length: int) -> bytes:
    headers = f"Content-Type: {kind}\r\nContent-Length: {length}\r\nCache-Control: no-store\r\nConnection: close"
    return f"{status}\r\n{headers}\r\n\r\n".encode()


class _Conversation(asyncio.Protocol):
    """One connection: reads a head, answers it, and keeps reading until the client is gone, so no answer is lost."""

    _transport: asyncio.Transport
    _deadline: asyncio.TimerHandle

    def __init__(self, open_: set[_Conversation]):
        self._open = open_
        self._head = b""
        self._answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._deadline = asyncio.get_running_loop().call_later(DEADLINE_S, transport.abort)
        if len(self._open) >= MOST_OPEN:
            transport.abort()
        else:
            self._open.add(self)

    def data_received(self, data: bytes) -> None:
        if self._answered:
            return
        self._head += data
        socks = self._head[0] == _SOCKS
        if socks or b"\r\n\r\n" in self._head or len(self._head) > MOST_HEAD:
            self._answered = True
            self._transport.write(answer(self._head[:MOST_HEAD]))
            self._head = b""
            self._transport.write_eof()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        self._open.discard(self)


async def refuse_all(listener: socket.socket) -> asyncio.Server:
    """Answer every connection to the listener with a refusal, for as long as the loop runs."""
    listener.setblocking(False)
    open_: set[_Conversation] = set()
    return await asyncio.get_running_loop().create_server(lambda: _Conversation(open_), sock=listener)
