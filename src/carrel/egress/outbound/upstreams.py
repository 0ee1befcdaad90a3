"""Dials: directly to a checked address, or through a proxy of the operator (HTTP CONNECT or SOCKS5, RFC 1928 and 1929).

Decides nothing: targets that reach this module are allowed. A sandbox with upstream proxies never connects directly. No
error and no log names the URL or the credentials of a proxy.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import os
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from ipaddress import IPv4Address, ip_address
from urllib.parse import unquote, urlsplit

from carrel.egress.access import Access, AccessRefused, Address, Target
from carrel.egress.http.messages import MOST, end_of, read_response
from carrel.egress.plan import Upstream
from carrel.egress.sockets import IDLE_S, connect, look, send, take
from carrel.errors import InvalidRequest
from carrel.primitives.backoff import Backoff
from carrel.primitives.tasks import cancel

# The replies of a SOCKS server that mean it cannot reach the target. All others are about the server or its rules.
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
    """The upstream proxy does not work, for any target."""


class Doubtful(Exception):
    """The upstream proxy took a connection and did not answer: the fault may be its own or the target's."""


class Unreached(Exception):
    """The upstream proxy works and cannot reach the target at this address."""


@dataclass(frozen=True, slots=True)
class ProxyAddress:
    """The parsed URL of an upstream proxy."""

    name: str
    socks: bool
    host: str
    port: int
    user: str | None = field(repr=False)
    password: str = field(repr=False)

    @property
    def authorization(self) -> str:
        """The value of the `Proxy-Authorization` header."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


def read_proxy_address(upstream: Upstream) -> ProxyAddress:
    """Parse the URL of an upstream proxy. Raises `InvalidRequest`, which shows nothing of the URL."""

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
    """Open a tunnel through an HTTP proxy. Raises `AccessRefused` when it refuses."""
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    proof = "" if proxy.user is None else f"Proxy-Authorization: {proxy.authorization}\r\n"
    status = await _exchange(connection, f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n{proof}\r\n")
    if 200 <= status < 300:
        return
    reason = f"{status} {HTTPStatus(status).phrase}" if status in set(HTTPStatus) else str(status)
    if status in _HTTP_UNREACHED:
        raise Unreached(reason)
    raise _refusal(proxy, reason, credentials=status == HTTPStatus.PROXY_AUTHENTICATION_REQUIRED)


async def greet_by_http(connection: socket.socket, proxy: ProxyAddress) -> None:
    """Check that an HTTP proxy answers. Any answer will do, also one that asks for credentials or does not know
    OPTIONS.
    """
    host = f"[{proxy.host}]" if ":" in proxy.host else proxy.host
    await _exchange(connection, f"OPTIONS * HTTP/1.1\r\nHost: {host}:{proxy.port}\r\n\r\n")


async def _exchange(connection: socket.socket, request: str) -> int:
    """Send a request and return the status of the response. Takes exactly its head: further bytes are the target's."""
    await send(connection, request.encode())
    try:
        while True:
            head = take(connection, await look(connection, end_of, MOST, IDLE_S))
            status = read_response(head).status
            if status >= 200:
                return status
            if status == HTTPStatus.SWITCHING_PROTOCOLS:
                raise Failed("its answer makes no sense")
    except AccessRefused:
        raise Failed("it does not answer in HTTP") from None


async def greet_by_socks(connection: socket.socket, proxy: ProxyAddress) -> int:
    """Greet a SOCKS server and return the method of authentication that it chose."""
    methods = b"\x00" if proxy.user is None else b"\x00\x02"
    await send(connection, b"\x05" + bytes([len(methods)]) + methods)
    version, method = await _exactly(connection, 2)
    if version != 5:
        raise Failed("it does not answer in SOCKS5")
    return method


async def connect_by_socks(connection: socket.socket, proxy: ProxyAddress, host: str, port: int) -> None:
    """Open a tunnel through a SOCKS server. Raises `AccessRefused` when it refuses."""
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


def _refusal(proxy: ProxyAddress, reason: str, *, credentials: bool = False) -> AccessRefused:
    return AccessRefused(
        f"the upstream proxy '{proxy.name}' refused the connection: {reason}",
        code="upstream_refused",
        status=502,
        hint="the operator has to correct the credentials of this upstream" if credentials else None,
    )


MOST_ADDRESSES = 4
"""How many addresses of one target are tried."""

_NEXT_S = 0.25  # after this time without an answer, the next address is tried too (RFC 8305)
_REACH_S = 3.0  # for an upstream to accept a connection: it is near, and another may be available
_KEPT_S = 30.0  # how long the addresses of an upstream are cached
_WANTED_S = 120.0  # how long an upstream is still checked after its last use
_PAUSE_S = 1.0  # between two checks, however often they are requested
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0


# directly


async def dial_directly(
    target: Target, addresses: Sequence[Address], access: Access, *, timeout_s: float = 10.0
) -> socket.socket:
    """Connect to the first checked address that answers; an `access.Dial`."""
    try:
        if len(addresses) == 1:
            address = addresses[0]
            connected = await connect(address, target.port, timeout_s)
        else:
            async with asyncio.timeout(timeout_s):
                connected, address = await _race(addresses, target.port)
    except TimeoutError:
        raise AccessRefused(f"{target} does not answer", code="timed_out", status=504, retry=True) from None
    except OSError as error:
        raise AccessRefused(f"{target} cannot be reached: {_words(error)}", code="unreachable", status=502) from None
    access.address = str(address)
    return connected


async def _race(addresses: Sequence[Address], port: int) -> tuple[socket.socket, Address]:
    """Connect to several addresses, each a little later than the one before or as soon as that fails; return the first
    connection.
    """
    waiting = list(addresses[:MOST_ADDRESSES])
    if not waiting:
        raise OSError(errno.EHOSTUNREACH, "no address")
    if len(waiting) == 1:
        return await connect(waiting[0], port), waiting[0]
    failure: OSError | None = None
    running: dict[asyncio.Task[socket.socket], Address] = {}
    try:
        while waiting or running:
            if waiting:
                address = waiting.pop(0)
                running[asyncio.create_task(connect(address, port))] = address
            done, _ = await asyncio.wait(
                running, timeout=_NEXT_S if waiting else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                address = running.pop(task)
                if task.exception() is None:
                    return task.result(), address
                failure = _failure(task)
    finally:
        for task in running:
            task.cancel()
            task.add_done_callback(_drop)
    assert failure is not None
    raise failure


def _drop(task: asyncio.Task[socket.socket]) -> None:
    """Close a connection that was not the first."""
    if not task.cancelled() and task.exception() is None:
        task.result().close()


def _failure(task: asyncio.Task[socket.socket]) -> OSError:
    error = task.exception()
    return error if isinstance(error, OSError) else OSError(errno.EIO, "the connection failed")


def _words(error: OSError) -> str:
    return os.strerror(error.errno).lower() if error.errno else "the connection failed"


# through upstreams


@dataclass(slots=True)
class _State:
    """The state of an upstream proxy."""

    proxy: ProxyAddress
    wanted: float = 0.0
    down: bool = False
    backoff: Backoff = field(default_factory=lambda: Backoff(_FIRST_WAIT_S, _LONGEST_WAIT_S))
    again: float = 0.0
    """When it may be used again, while it is down."""
    addresses: tuple[Address, ...] = ()
    looked_up: float = -_KEPT_S


class Health:
    """Knows which upstream proxies work: from every dial, and from checks while they are in use. One for the process.

    An upstream is down only when it cannot be reached or does not speak its protocol, never because of a target:
    otherwise one sandbox could make it unavailable to others. If the cause is not clear, the upstream is checked at
    once.
    """

    def __init__(self, *, every_s: float = 15.0):
        self._every_s = every_s
        self._states: dict[Upstream, _State] = {}
        self._doubted: set[Upstream] = set()
        self._doubt = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to check upstreams that are in use."""
        self._task = self._task or asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Stop the checks."""
        task, self._task = self._task, None
        await cancel([task])

    def works(self, upstream: Upstream) -> bool:
        """Whether the upstream is up, or has been down long enough to be tried again."""
        state = self._states.get(upstream)
        return state is None or not state.down or time.monotonic() >= state.again

    def failed(self, upstream: Upstream) -> None:
        """Record a failure. After each, the upstream is not used for longer."""
        state, now = self._state(upstream), time.monotonic()
        if state.down and now < state.again:
            return  # several connections failed at the same time
        state.down, state.again = True, now + state.backoff.next_pause()
        state.looked_up = -_KEPT_S

    def worked(self, upstream: Upstream) -> None:
        """Record a success."""
        state = self._state(upstream)
        state.down = False
        state.backoff.reset()

    def doubt(self, upstream: Upstream) -> None:
        """Request a check now."""
        self._doubted.add(upstream)
        self._doubt.set()

    async def reach(self, upstream: Upstream) -> socket.socket:
        """Connect to the upstream itself. Raises `OSError`, after recording the failure."""
        state = self._state(upstream)
        try:
            async with asyncio.timeout(_REACH_S):
                if time.monotonic() >= state.looked_up + _KEPT_S:
                    state.addresses = await _look_up(state.proxy.host)
                    state.looked_up = time.monotonic()
                connection, _ = await _race(state.addresses, state.proxy.port)
        except OSError:  # includes TimeoutError
            self.failed(upstream)
            raise
        return connection

    def proxy(self, upstream: Upstream) -> ProxyAddress:
        """Return the parsed URL of an upstream, and mark it as in use."""
        state = self._state(upstream)
        state.wanted = time.monotonic()
        return state.proxy

    def _state(self, upstream: Upstream) -> _State:
        state = self._states.get(upstream)
        if state is None:
            state = self._states[upstream] = _State(read_proxy_address(upstream))
        return state

    async def _watch(self) -> None:
        due = time.monotonic() + self._every_s
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(due - time.monotonic()):
                    await self._doubt.wait()
            self._doubt.clear()
            checked, self._doubted = self._doubted, set()
            if time.monotonic() >= due:
                due = time.monotonic() + self._every_s
                self._forget()
                checked |= self._states.keys()
            async with asyncio.TaskGroup() as group:
                for upstream in checked:
                    group.create_task(self._check(upstream))
            await asyncio.sleep(min(_PAUSE_S, self._every_s))

    def _forget(self) -> None:
        recently = time.monotonic() - _WANTED_S
        for upstream in [each for each, state in self._states.items() if state.wanted < recently]:
            del self._states[upstream]

    async def _check(self, upstream: Upstream) -> None:
        """Connect and greet. Nothing is sent beyond the proxy."""
        state = self._state(upstream)
        greet: Callable[[socket.socket, ProxyAddress], Awaitable[object]]
        greet = greet_by_socks if state.proxy.socks else greet_by_http
        try:
            with await self.reach(upstream) as connection:
                async with asyncio.timeout(_REACH_S):
                    await greet(connection, state.proxy)
        except (OSError, Failed):
            self.failed(upstream)
        else:
            self.worked(upstream)


async def _look_up(host: str) -> tuple[Address, ...]:
    """Look up an upstream. It is the operator's, so any address is allowed. Raises `OSError`."""
    try:
        return (ip_address(host),)
    except ValueError:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except UnicodeError:
            raise OSError(errno.EHOSTUNREACH, "no host can have this name") from None
        return tuple(dict.fromkeys(ip_address(str(each[4][0]).partition("%")[0]) for each in found))


class Upstreams:
    """Dials for one sandbox: through the first upstream of its list that works, or directly if the list is empty."""

    def __init__(self, upstreams: Sequence[Upstream], health: Health, *, timeout_s: float = 10.0):
        """Raises `InvalidRequest` for an invalid URL."""
        self._health = health
        self._timeout_s = timeout_s
        self.change(upstreams)

    def change(self, upstreams: Sequence[Upstream]) -> None:
        """Replace the upstreams. Raises as the constructor does, and then changes nothing."""
        for upstream in upstreams:
            read_proxy_address(upstream)
        self._upstreams = tuple(upstreams)

    async def __call__(self, target: Target, addresses: Sequence[Address], access: Access) -> socket.socket:
        """Connect to a target. If the rules of an upstream refuse it, the next upstream is not tried."""
        if not self._upstreams:
            return await dial_directly(target, addresses, access, timeout_s=self._timeout_s)
        unreached: list[str] = []
        for upstream in self._upstreams:
            self._health.proxy(upstream)  # marks those that are down as in use too
        for upstream in filter(self._health.works, self._upstreams):
            access.upstream, access.address = upstream.name, None
            try:
                return await self._through(upstream, target, addresses, access)
            except (Failed, OSError):
                continue
            except Doubtful:
                unreached.append(f"'{upstream.name}' does not answer")
            except Unreached as error:
                unreached.append(f"'{upstream.name}' says {error}")
        if unreached:
            reasons = "; ".join(unreached)
            raise AccessRefused(
                f"{target} cannot be reached by upstream proxy: {reasons}", code="unreachable", status=502
            )
        names = ", ".join(f"'{upstream.name}'" for upstream in self._upstreams)
        raise AccessRefused(
            f"no upstream proxy works: {names}",
            code="upstream_unavailable",
            status=502,
            hint="try again later; connections never go around the upstream proxies",
            retry=True,
        )

    async def _through(
        self, upstream: Upstream, target: Target, addresses: Sequence[Address], access: Access
    ) -> socket.socket:
        named = upstream.remote_names and target.literal is None
        hosts = [target.host] if named else [str(address) for address in addresses[:MOST_ADDRESSES]]
        error = Unreached("it was given no address")
        for host in hosts:
            try:
                connection = await self._ask(upstream, host, target.port)
            except Unreached as failure:
                error = failure
                continue
            access.address = None if named else host
            return connection
        raise error

    async def _ask(self, upstream: Upstream, host: str, port: int) -> socket.socket:
        proxy = self._health.proxy(upstream)
        connect = connect_by_socks if proxy.socks else connect_by_http
        connection = await self._health.reach(upstream)
        try:
            async with asyncio.timeout(self._timeout_s):
                await connect(connection, proxy, host, port)
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError | Failed):
                self._health.doubt(upstream)
                raise Doubtful from None
            if isinstance(error, Unreached | AccessRefused):
                self._health.worked(upstream)
            raise
        self._health.worked(upstream)
        return connection
