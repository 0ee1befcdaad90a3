"""What is said to a proxy of the operator's before it leads on to the target: HTTP CONNECT, or SOCKS5 (RFC 1928, 1929).

Works on a connection to the proxy, and knows neither how that was made, nor how long it may take, nor whether another
proxy could be asked. No error names a URL or a credential.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import socket
from dataclasses import dataclass, field
from http import HTTPStatus
from ipaddress import IPv4Address, ip_address
from urllib.parse import unquote, urlsplit

from carrel.egress.access import Refused
from carrel.egress.http.messages import MOST, end_of, read_response
from carrel.egress.plan import Upstream
from carrel.egress.sockets import IDLE_S, look, send, take
from carrel.errors import InvalidRequest

# What a SOCKS server says when it cannot reach the target; everything else it says about itself or about its rules.
_SOCKS_UNREACHED = {
    1: "it failed",
    3: "the network is unreachable",
    4: "the host is unreachable",
    5: "the connection was refused",
    6: "it took too long",
    8: "it cannot reach such an address",
}
_HTTP_UNREACHED = (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)


class Failed(Exception):
    """The upstream itself does not work, whoever is asked for."""


class Doubtful(Exception):
    """It took a connection and then did not answer: perhaps the target's fault, perhaps its own."""


class Unreached(Exception):
    """The upstream works and cannot reach the target at this address."""


@dataclass(frozen=True, slots=True)
class ProxyAddress:
    """An upstream's URL, read."""

    name: str
    socks: bool
    host: str
    port: int
    user: str | None = field(repr=False)
    password: str = field(repr=False)

    @property
    def authorization(self) -> str:
        """The header that HTTP proxies are given."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


def read_proxy_address(upstream: Upstream) -> ProxyAddress:
    """The address of an upstream proxy. Raises `InvalidRequest`, which shows nothing of the URL."""

    def wrong(what: str) -> InvalidRequest:
        return InvalidRequest(
            f"the URL of the upstream '{upstream.name}' {what}",
            field="upstreams",
            hint="http://user:password@host:port or socks5://user:password@host:port, with odd characters as %XX",
        )

    try:
        url = urlsplit(upstream.url)
        host, port = url.hostname, url.port
        user = None if url.username is None else unquote(url.username, errors="strict")
        password = unquote(url.password or "", errors="strict")
    except ValueError:
        raise wrong("cannot be read") from None
    if url.scheme not in ("http", "socks5", "socks5h"):
        raise wrong("is neither http:// nor socks5://")
    if not host or not port:
        raise wrong("needs a host and a port")
    if url.path not in ("", "/") or url.query or url.fragment:
        raise wrong("has something behind its port")
    if not (user or "").isprintable() or not password.isprintable():
        raise wrong("has a user or password with a character it may not have")
    socks = url.scheme != "http"
    if user is not None:
        if socks and not (1 <= len(user.encode()) <= 255 and 1 <= len(password.encode()) <= 255):
            raise wrong("has a user or password that SOCKS5 cannot carry")
        if not socks and ":" in user:
            raise wrong("has a user with a colon")
    return ProxyAddress(upstream.name, socks, host, port, user, password)


async def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = await asyncio.get_running_loop().sock_recv(connection, size - len(data))
        if not more:
            raise ConnectionResetError(errno.ECONNRESET, "closed")
        data += more
    return data


async def connect_by_http(connection: socket.socket, proxy: ProxyAddress, host: str, port: int) -> None:
    """CONNECT. Raises `Refused` when the proxy says no."""
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    proof = "" if proxy.user is None else f"Proxy-Authorization: {proxy.authorization}\r\n"
    status = await _exchange(connection, f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n{proof}\r\n")
    if 200 <= status < 300:
        return
    said = f"{status} {HTTPStatus(status).phrase}" if status in set(HTTPStatus) else str(status)
    if status in _HTTP_UNREACHED:
        raise Unreached(said)
    raise _refusal(proxy, said, credentials=status == HTTPStatus.PROXY_AUTHENTICATION_REQUIRED)


async def greet_by_http(connection: socket.socket, proxy: ProxyAddress) -> None:
    """Any answer will do: a proxy that wants credentials or knows no OPTIONS is there."""
    host = f"[{proxy.host}]" if ":" in proxy.host else proxy.host
    await _exchange(connection, f"OPTIONS * HTTP/1.1\r\nHost: {host}:{proxy.port}\r\n\r\n")


async def _exchange(connection: socket.socket, request: str) -> int:
    """The status of the answer. Its head is taken to its last byte and not one further: the rest is the target's."""
    await send(connection, request.encode())
    try:
        while True:
            head = take(connection, await look(connection, end_of, MOST, IDLE_S))
            status = read_response(head).status
            if status >= 200:
                return status
            if status == HTTPStatus.SWITCHING_PROTOCOLS:
                raise Failed("its answer makes no sense")
    except Refused:
        raise Failed("it does not answer in HTTP") from None


async def greet_by_socks(connection: socket.socket, proxy: ProxyAddress) -> int:
    """The method of authentication that the server chose."""
    methods = b"\x00" if proxy.user is None else b"\x00\x02"
    await send(connection, b"\x05" + bytes([len(methods)]) + methods)
    version, method = await _exactly(connection, 2)
    if version != 5:
        raise Failed("it does not answer in SOCKS5")
    return method


async def connect_by_socks(connection: socket.socket, proxy: ProxyAddress, host: str, port: int) -> None:
    """The whole of RFC 1928. Raises `Refused` when the proxy says no."""
    method = await greet_by_socks(connection, proxy)
    if method == 2 and proxy.user is not None:
        user, password = proxy.user.encode(), proxy.password.encode()
        await send(connection, b"\x01" + bytes([len(user)]) + user + bytes([len(password)]) + password)
        if (await _exactly(connection, 2))[1] != 0:
            raise _refusal(proxy, "user and password are wrong", credentials=True)
    elif method != 0:
        raise _refusal(proxy, "it wants other credentials", credentials=True)
    await send(connection, b"\x05\x01\x00" + _socks_address(host) + port.to_bytes(2))
    version, reply, _, kind = await _exactly(connection, 4)
    if version != 5 or kind not in (1, 3, 4):
        raise Failed("it does not answer in SOCKS5")
    bound = {1: 4, 4: 16}.get(kind) or (await _exactly(connection, 1))[0]
    await _exactly(connection, bound + 2)
    if reply in _SOCKS_UNREACHED:
        raise Unreached(_SOCKS_UNREACHED[reply])
    if reply != 0:
        raise _refusal(proxy, "its rules do not allow it" if reply == 2 else f"reply {reply}")


def _socks_address(host: str) -> bytes:
    try:
        address = ip_address(host)
    except ValueError:
        name = host.encode("ascii")
        return b"\x03" + bytes([len(name)]) + name
    return (b"\x01" if isinstance(address, IPv4Address) else b"\x04") + address.packed


def _refusal(proxy: ProxyAddress, said: str, *, credentials: bool = False) -> Refused:
    return Refused(
        f"the upstream proxy '{proxy.name}' refused the connection: {said}",
        code="upstream_refused",
        status=502,
        hint="the operator has to correct the credentials of this upstream" if credentials else None,
    )
