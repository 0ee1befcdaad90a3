"""The HTTP client for the operator's package indexes, and a fair limit on how many requests run at once.

An index that the operator named may be at any address. Where a public index leads, by a link or a redirect, must not be
a private address. Credentials are sent only to the index's own origin and appear in no message.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from base64 import b64encode
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import proxy_bypass

import httpcore
import httpx

from carrel.egress.plan import PackageIndex
from carrel.policy.rules import addresses


class FairLimit:
    """Permits for concurrent work, shared fairly. For one event loop.

    A caller gets another permit if it has fewer than are free. So a single caller gets at most half of all permits, and
    the next caller always finds one.
    """

    def __init__(self, most: int):
        self._free = most
        self._taken: Counter[Hashable] = Counter()
        self._waiting: dict[SharedPermit, asyncio.Future[None]] = {}

    def permit(self) -> SharedPermit:
        """Create a permit, to join and then to wait for as an asynchronous context manager."""
        return SharedPermit(self)

    async def enter(self, permit: SharedPermit) -> None:
        """Wait for a permit."""
        future = self._waiting[permit] = asyncio.get_running_loop().create_future()
        self.give()
        try:
            await future
        except BaseException:
            self._waiting.pop(permit, None)
            self.leave(permit)
            raise

    def leave(self, permit: SharedPermit) -> None:
        """Return a permit, if it was given."""
        if permit.charged:
            (who,) = permit.charged
            permit.charged = ()
            self._free += 1
            self._taken[who] -= 1
            if not self._taken[who]:
                del self._taken[who]
            self.give()

    def give(self) -> None:
        """Give the free permits: first to the caller that has fewest, then in the order of requests."""
        while self._waiting:
            wanted = ((self._taken[who], who, permit) for permit in self._waiting for who in permit.who)
            taken, who, permit = min(wanted, key=lambda each: each[0], default=(self._free, None, None))
            if permit is None or taken >= self._free:
                return
            future = self._waiting.pop(permit)
            if not future.done():
                self._free -= 1
                self._taken[who] += 1
                permit.charged = (who,)
                future.set_result(None)


class SharedPermit:
    """One permit, for everybody who joins it. It counts for the one of them that has fewest."""

    def __init__(self, limit: FairLimit):
        self._limit = limit
        self.who: dict[Hashable, None] = {}
        self.charged: tuple[()] | tuple[Hashable] = ()
        """The caller for which it counts, once it is given."""

    def join(self, who: Hashable) -> None:
        """Add a caller for which it may count."""
        self.who[who] = None
        self._limit.give()

    async def __aenter__(self) -> None:
        await self._limit.enter(self)

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._limit.leave(self)


MOST_REDIRECTS = 5
_TIMEOUT = httpx.Timeout(30.0, connect=10.0)
_LIMITS = httpx.Limits(max_connections=64, max_keepalive_connections=8, keepalive_expiry=30.0)
"""Enough for all pages and files that may be fetched at once: with a permit, nothing waits for a connection."""
_MOST_CLIENTS = 64

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a host name."""


class Unreachable(Exception):
    """An index did not answer a request as it must. The message names no URL and no credential."""


@dataclass(slots=True)
class _Client:
    http: httpx.AsyncClient
    users: int = 0


class IndexClient:
    """The HTTP client for all indexes. `proxy` is used for all hosts that `NO_PROXY` does not name."""

    def __init__(self, *, proxy: str | None = None, resolve: Resolve | None = None):
        self._proxy = proxy
        self._resolve = resolve or _look_up
        self._clients: dict[tuple[PackageIndex, bool, bool], _Client] = {}
        self._contexts: dict[tuple[bool, str | None], ssl.SSLContext] = {}
        self._private: dict[str, bool] = {}

    @asynccontextmanager
    async def get(
        self, index: PackageIndex, url: str, headers: Mapping[str, str], *, sealed: bool = False
    ) -> AsyncIterator[httpx.Response]:
        """Yield the response to a GET after redirects; its body is unread. Raises `Unreachable`.

        A redirect from https to http is followed only if the content is `sealed` by a hash or the index is trusted.
        """
        secure = urlsplit(index.url).scheme == "https" and not index.trusted and not sealed
        for _hop in range(MOST_REDIRECTS + 1):
            try:
                target, authorization = httpx.URL(_plain(url)), _credentials(index, url)
            except (ValueError, httpx.InvalidURL):
                raise Unreachable(_NO_ADDRESS) from None
            if target.scheme not in {"http", "https"} or not target.host:
                raise Unreachable(_NO_ADDRESS)
            if secure and target.scheme != "https":
                raise Unreachable("it redirected to a connection that is not encrypted")
            client = await self._join(index, target)
            try:
                async with _as_unreachable():
                    request = client.http.build_request("GET", target, headers={**headers, **authorization})
                    response = await client.http.send(request, stream=True, follow_redirects=False)
                try:
                    if not response.has_redirect_location:
                        async with _as_unreachable():
                            yield response
                        return
                    url = _joined(target, response.headers["location"])
                finally:
                    await response.aclose()
            finally:
                client.users -= 1
        raise Unreachable(f"it redirected more than {MOST_REDIRECTS} times")

    async def aclose(self) -> None:
        """Close every connection."""
        clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            await client.http.aclose()

    async def _join(self, index: PackageIndex, target: httpx.URL) -> _Client:
        """Return the client for an index, with one more user; the caller decrements `users`. Each index has its own
        connections, so that none is shared with a less trusted one.
        """
        proxied = self._proxy is not None and not proxy_bypass(target.host)
        chosen = index, proxied, target.scheme == "https"
        if (known := self._clients.get(chosen)) is None:
            guarded = not proxied and not await self._is_private(urlsplit(index.url).hostname or "")
            known = self._clients.get(chosen) or _Client(self._open(*chosen, guarded=guarded))
            self._clients[chosen] = known
        known.users += 1
        await self._drop_idle()
        return known

    def _open(self, index: PackageIndex, proxied: bool, encrypted: bool, *, guarded: bool) -> httpx.AsyncClient:
        try:
            # To read the certificates of the host takes longer than all else here; this one trusts nobody.
            context = self._context(index) if encrypted else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            transport = httpx.AsyncHTTPTransport(
                verify=context, limits=_LIMITS, proxy=self._proxy if proxied else None, trust_env=False
            )
        except (ValueError, ImportError, OSError):
            raise Unreachable("the proxy or certificate it is to be reached with cannot be used") from None
        if guarded:
            transport._pool = httpcore.AsyncConnectionPool(
                ssl_context=context,
                max_connections=_LIMITS.max_connections,
                max_keepalive_connections=_LIMITS.max_keepalive_connections,
                keepalive_expiry=_LIMITS.keepalive_expiry,
                network_backend=_Guarded(urlsplit(index.url).hostname or "", self._resolve),
            )
        return httpx.AsyncClient(transport=transport, timeout=_TIMEOUT, trust_env=False)

    def _context(self, index: PackageIndex) -> ssl.SSLContext:
        chosen = (index.trusted, index.cert)
        if chosen not in self._contexts:
            if index.trusted:
                context = httpx.create_ssl_context(verify=False)
            elif index.cert is not None:
                context = ssl.create_default_context(cafile=index.cert)
            else:
                context = httpx.create_ssl_context()
                context.load_default_certs()
            self._contexts[chosen] = context
        return self._contexts[chosen]

    async def _is_private(self, host: str) -> bool:
        if host not in self._private:
            try:
                self._private[host] = not all(map(_is_public, await self._resolve(host, 0)))
            except OSError:
                return False
        return self._private[host]

    async def _drop_idle(self) -> None:
        idle = [chosen for chosen, client in self._clients.items() if not client.users]
        dropped = [self._clients.pop(chosen) for chosen in idle[: max(0, len(self._clients) - _MOST_CLIENTS)]]
        for client in dropped:
            await client.http.aclose()


class _Guarded(httpcore.AsyncNetworkBackend):
    """Connects only to public addresses, except for the index's own host. Uses exactly the addresses it has checked."""

    def __init__(self, own: str, resolve: Resolve):
        self._own = own
        self._resolve = resolve
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the first address that answers."""
        try:
            found = await self._resolve(host, port)
        except OSError:
            raise httpcore.ConnectError("the name is not known") from None
        if host != self._own and not all(map(_is_public, found)):
            raise httpcore.ConnectError(_PRIVATE)
        failure: Exception = httpcore.ConnectError("the name has no address")
        for address in found[:4]:
            try:
                return await self._inner.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure

    async def sleep(self, seconds: float) -> None:
        """Sleep."""
        await asyncio.sleep(seconds)


_NO_ADDRESS = "it redirected to something that is not a web address"
_PRIVATE = "it redirected to a private address"


def _is_public(address: str) -> bool:
    return addresses.why_not_public(ip_address(address.partition("%")[0])) is None


async def _look_up(host: str, port: int) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def _plain(url: str) -> str:
    """Return the URL without user and password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment="").geturl()


def _joined(base: httpx.URL, location: str) -> str:
    try:
        return str(base.join(location))
    except (ValueError, httpx.InvalidURL):
        raise Unreachable(_NO_ADDRESS) from None


def plain(index: PackageIndex) -> str:
    """Return the URL of an index without user and password."""
    return _plain(index.url)


def _credentials(index: PackageIndex, url: str) -> dict[str, str]:
    """Return the `authorization` header for a URL: of its own user, or on the same origin of the index's user."""
    own, asked = urlsplit(index.url), urlsplit(url)
    same = (own.scheme, own.hostname, own.port) == (asked.scheme, asked.hostname, asked.port)
    source = asked if asked.username else own if same else None
    if source is None or not source.username:
        return {}
    pair = f"{unquote(source.username)}:{unquote(source.password or '')}"
    return {"authorization": f"Basic {b64encode(pair.encode()).decode()}"}


@asynccontextmanager
async def _as_unreachable() -> AsyncIterator[None]:
    """Turn the errors of the HTTP library into `Unreachable` with a message that names no address."""
    try:
        yield
    except httpx.TimeoutException:
        raise Unreachable("it did not answer in time") from None
    except httpx.ConnectError as error:
        message = str(error)
        if "CERTIFICATE_VERIFY_FAILED" in message:
            raise Unreachable("its certificate is not valid") from None
        raise Unreachable(_PRIVATE if _PRIVATE in message else "it cannot be reached") from None
    except httpx.ProxyError:
        raise Unreachable("the proxy on the way to it refused") from None
    except httpx.HTTPError:
        raise Unreachable("the connection to it broke") from None
