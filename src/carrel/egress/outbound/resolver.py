"""Looks names up, with the system's resolver or given name servers. Knows no policy: the caller checks the addresses.

A name is looked up once for all who wait for it, and the answer is cached for some seconds.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ipaddress import ip_address

import dns.asyncresolver
import dns.exception
import dns.name
import dns.nameserver
import dns.resolver

from carrel.egress.access import AccessRefused, Address, Resolve
from carrel.egress.outbound.names import read_authority
from carrel.errors import InvalidRequest
from carrel.primitives.cache import Cache
from carrel.primitives.tasks import cancel

DEADLINE_S = 5.0
MOST_KEPT = 1000
MOST_AT_ONCE = 256
"""Names that are looked up at the same time."""
MOST_OF_ONE = 8
"""Of these, names for one sandbox."""
THREADS = 64
ABSENT_S = 1.0
"""How long it is cached that a name has no address."""

_Ask = Callable[[str], Awaitable[list[Address]]]


def use_exact_names() -> None:
    """Make the system look up exactly the names it is given. Call it once, before the first look-up.

    Otherwise it may try `api.example.org.office.example` first, and the owner of that name could answer for the allowed
    one.
    """
    os.environ["LOCALDOMAIN"] = ""
    # A look-up cannot be cancelled, so its thread should not wait much longer for silent servers than the caller does.
    os.environ["RES_OPTIONS"] = f"{os.environ.get('RES_OPTIONS', '')} timeout:2 attempts:2".lstrip()


class Resolver:
    """An `access.Resolve`, for one event loop."""

    def __init__(self, nameservers: Sequence[str] = (), *, ttl_s: float = 5.0):
        """`nameservers` are addresses such as `1.1.1.1` or `[::1]:5353`; if there are none, the system's resolver is
        used.
        """
        self._pool: ThreadPoolExecutor | None = None
        if nameservers:
            self._ask: _Ask = partial(_by_servers, _servers(nameservers))
        else:
            self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="names")
            self._ask = partial(_by_system, self._pool)
        self._known: Cache[str, tuple[Address, ...]] = Cache(MOST_KEPT, ttl_s)
        self._absent: Cache[str, tuple[()]] = Cache(MOST_KEPT, ABSENT_S)
        self._running: dict[str, asyncio.Task[tuple[Address, ...]]] = {}

    async def __call__(self, name: str) -> Sequence[Address]:
        """Look up a name. Raises `AccessRefused` with status 502, or 504 when there is no answer in time."""
        addresses = self._known.get(name)
        if addresses is None and (addresses := self._absent.get(name)) is None:
            addresses = await self._once(name)
        if not addresses:
            raise _failed(f"the name {name} has no address")
        return addresses

    def share(self, most: int = MOST_OF_ONE) -> Resolve:
        """Return the resolver for one sandbox, with a limit on names at once; more names wait."""
        turns = asyncio.Semaphore(most)

        async def resolve(name: str) -> Sequence[Address]:
            try:
                async with asyncio.timeout(DEADLINE_S):
                    await turns.acquire()
            except TimeoutError:
                raise _too_many() from None
            try:
                return await self(name)
            finally:
                turns.release()

        return resolve

    async def close(self) -> None:
        """Cancel all look-ups."""
        await cancel(list(self._running.values()))
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    async def _once(self, name: str) -> tuple[Address, ...]:
        task = self._running.get(name)
        if task is None:
            if len(self._running) >= MOST_AT_ONCE:
                raise _too_many()
            task = self._running[name] = asyncio.create_task(self._look_up(name))
            task.add_done_callback(lambda done: self._done(name, done))
        # One caller that gives up does not cancel the look-up for the others.
        return await asyncio.shield(task)

    async def _look_up(self, name: str) -> tuple[Address, ...]:
        try:
            async with asyncio.timeout(DEADLINE_S):
                return tuple(dict.fromkeys(await self._ask(name)))
        except TimeoutError:
            raise _failed(f"nobody answered in time what the address of {name} is", status=504) from None

    def _done(self, name: str, task: asyncio.Task[tuple[Address, ...]]) -> None:
        del self._running[name]
        # Those who still wait get the failure too.
        if task.cancelled() or task.exception() is not None:
            return
        if addresses := task.result():
            self._known.put(name, addresses)
        else:
            self._absent.put(name, ())


async def _by_system(pool: ThreadPoolExecutor, name: str) -> list[Address]:
    # As bytes: a string would be converted by a codec that changes some names.
    ask = partial(socket.getaddrinfo, name.encode("ascii"), None, type=socket.SOCK_STREAM)
    try:
        found = await asyncio.get_running_loop().run_in_executor(pool, ask)
    except socket.gaierror as error:
        if error.errno in {socket.EAI_NONAME, socket.EAI_NODATA}:
            return []
        raise _failed(f"the name {name} cannot be looked up: {error.strerror}") from None
    except OSError:
        raise _failed(f"the name {name} cannot be looked up") from None
    return [ip_address(str(address[0]).partition("%")[0]) for *_, address in found]


def _servers(nameservers: Iterable[str]) -> dns.asyncresolver.Resolver:
    resolver = dns.asyncresolver.Resolver(configure=False)
    resolver.cache = None
    resolver.timeout = 1.5  # then the next server, or the same one again
    resolver.nameservers = [_server(each) for each in nameservers]
    return resolver


def _server(text: str) -> dns.nameserver.Nameserver:
    bare = f"[{text}]" if text.count(":") > 1 and not text.startswith("[") else text
    try:
        target = read_authority(bare, 53)
    except AccessRefused:
        target = None
    if target is None or target.literal is None:
        raise InvalidRequest(f"'{text[:100]}' is not the address of a name server", hint="write 1.1.1.1 or [::1]:5353")
    return dns.nameserver.Do53Nameserver(target.host, target.port)


async def _by_servers(resolver: dns.asyncresolver.Resolver, name: str) -> list[Address]:
    found: list[Address] = []
    failed: dns.exception.DNSException | None = None
    whole = dns.name.from_text(name)
    answers = await asyncio.gather(
        *(resolver.resolve(whole, kind, search=False, lifetime=DEADLINE_S) for kind in ("A", "AAAA")),
        return_exceptions=True,
    )
    for answer in answers:
        if isinstance(answer, dns.resolver.Answer):
            found += [ip_address(record.address) for record in answer]
        elif isinstance(answer, dns.exception.DNSException):
            if not isinstance(answer, dns.resolver.NXDOMAIN | dns.resolver.NoAnswer):
                failed = answer
        else:
            raise answer
    if not found and isinstance(failed, dns.exception.Timeout):
        raise TimeoutError
    if not found and failed is not None:
        raise _failed(f"the name {name} cannot be looked up: its name servers do not know")
    return found


def _failed(reason: str, *, status: int = 502) -> AccessRefused:
    return AccessRefused(reason, code="timed_out" if status == 504 else "unreachable", status=status, retry=True)


def _too_many() -> AccessRefused:
    return AccessRefused("too many names are being looked up", code="limit_exceeded", status=503, retry=True)
