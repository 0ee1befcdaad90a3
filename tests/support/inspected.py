"""A site with TLS, and the way out of a sandbox that looks into it: the real gateway, and what was reported."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from urllib.parse import quote

import httpx

from carrel.egress.access import Access, Address, Target
from carrel.egress.http.authority import Authority, bundle, make_authority
from carrel.egress.http.inspection import Inspection
from carrel.egress.http.messages import RequestHead, read_request
from carrel.egress.http.streams import Body, TlsStream
from carrel.egress.listener.gateway import Gateway
from carrel.egress.outbound.connections import Outbound
from carrel.egress.outbound.upstreams import dial_directly
from carrel.egress.plan import EgressPlan, Injected, placeholder
from carrel.policy.documents import settings, sources
from carrel.policy.rules.layers import Layer
from carrel.policy.verdict import Verdict

SECRET = "tOp/s3cr3t+V4lue=="
PLACEHOLDER = placeholder("API_KEY")
PUBLIC = Authority(make_authority("public"))
OWN = make_authority("s1")
CREDENTIAL = Injected("api.test", "Authorization", f"Bearer {SECRET}", SECRET, "API_KEY")
SPELLINGS = [
    SECRET.encode(),
    quote(SECRET, safe="").encode(),
    base64.b64encode(SECRET.encode()),
    base64.b64encode(f"user:{SECRET}".encode()),
    SECRET.encode().hex().encode(),
    SECRET.replace("/", "\\/").encode(),
]
"""Ways a server may write it."""


def spoken(data: bytes) -> bool:
    """Whether the value can be read from the bytes."""
    return any(each in data for each in SPELLINGS)


@dataclass
class Seen:
    """A request that the site got."""

    request: RequestHead
    body: bytes

    def header(self, name: str) -> list[str]:
        return [value.decode() for value in self.request.all(name.encode())]


Reply = Callable[["Seen"], Sequence[bytes]]


def said(body: bytes, *headers: bytes, status: bytes = b"200 OK") -> list[bytes]:
    lines = b"".join(each + b"\r\n" for each in headers)
    return [b"HTTP/1.1 %s\r\nContent-Length: %d\r\n%s\r\n" % (status, len(body), lines), body]


def echo(seen: Seen) -> Sequence[bytes]:
    return said(repr(seen.request.headers).encode() + seen.body)


@dataclass
class Site:
    """A TLS server that answers with `reply`, piece by piece; a reply that ends with None ends the connection."""

    reply: Callable[[Seen], Sequence[bytes | None]] = echo
    seen: list[Seen] = field(default_factory=list)
    host: str = "api.test"
    port: int = 0
    handler: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]] | None = None
    connections: int = 0
    plain: bool = False

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(OSError, asyncio.CancelledError, asyncio.IncompleteReadError):
            if self.handler is not None:
                await self.handler(reader, writer)
            else:
                await self._serve(reader, writer)
        writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = TlsStream(reader, writer, lambda: None)
        while head := await stream.head():
            request = read_request(head)
            if request.all(b"expect"):
                await stream.write(b"HTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n")
            body, reading = b"", Body(stream, request, lambda _: None)
            while request.body and (piece := await reading.piece()):
                body += piece
            self.seen.append(Seen(request, body))
            for each in self.reply(self.seen[-1]):
                if each is None:
                    return
                await stream.write(each)
                await asyncio.sleep(0)


@asynccontextmanager
async def running(site: Site, context: ssl.SSLContext | None = None) -> AsyncIterator[Site]:
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        await site(reader, writer)
        tasks.discard(task)

    tls = None if site.plain else context or PUBLIC.context(site.host)
    server = await asyncio.start_server(serve, "127.0.0.2", 0, ssl=tls)
    site.port = server.sockets[0].getsockname()[1]
    try:
        yield site
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
        await asyncio.sleep(0.01)  # transports that were told to close do


class Told:
    """What was reported."""

    def __init__(self) -> None:
        self.accesses: list[Access] = []
        self.ended: list[Access] = []

    def opened(self, access: Access) -> None:
        self.accesses.append(access)

    def closed(self, access: Access) -> None:
        self.ended.append(access)

    @property
    def requests(self) -> list[Access]:
        return [each for each in self.accesses if each.protocol == "http"]


@dataclass
class Proxy:
    """The way out of a sandbox, and the file of roots inside it."""

    outbound: Outbound
    report: Told
    port: int
    roots: str
    asked: list[Target] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    """The requests that were asked about."""
    on_ask: Callable[[], None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        context = ssl.create_default_context(cafile=self.roots)
        async with httpx.AsyncClient(proxy=self.url, verify=context, trust_env=False, timeout=20) as client:
            yield client

    @asynccontextmanager
    async def raw(self, site: Site) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """TLS inside a tunnel, to say anything through."""
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, b"CONNECT %s:%d HTTP/1.1\r\n\r\n" % (site.host.encode(), site.port))
        assert (await loop.sock_recv(connection, 39)) == b"HTTP/1.1 200 Connection established\r\n\r\n"
        context = ssl.create_default_context(cafile=self.roots)
        reader, writer = await asyncio.open_connection(sock=connection, ssl=context, server_hostname=site.host)
        try:
            yield reader, writer
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def curl(self, url: str, *arguments: str) -> tuple[int, bytes]:
        process = await asyncio.create_subprocess_exec(
            "curl", "-sS", "-m", "20", "--proxy", self.url, "--cacert", self.roots, "-i", "--suppress-connect-headers",
            *arguments, url,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env={"PATH": os.environ["PATH"]},
        )  # fmt: skip
        output, _ = await process.communicate()
        return process.returncode or 0, output


def plan(
    site: Site, injected: Sequence[Injected] = (CREDENTIAL,), authority: str | None = OWN, **more: object
) -> EgressPlan:
    web = {
        "allowed_domains": ["api.test", "other.test"],
        "allowed_ports": [site.port],
        "inspected_domains": ["api.test", "other.test"],
        **more,
    }
    allowed = settings.load('{"permissions": {"allow": ["network(outbound:127.0.0.2)"]}}')
    own = sources.load(json.dumps({"web_access": {"enabled": True, **web}}))
    return EgressPlan("s1", "c1", (Layer("settings.json", allowed, own),), tuple(injected), authority=authority)


@asynccontextmanager
async def way_out(
    the_plan: EgressPlan, *, roots: str | None = PUBLIC.certificate, idle_s: float = 60.0
) -> AsyncIterator[Proxy]:
    async def resolve(_name: str) -> Sequence[Address]:
        return [IPv4Address("127.0.0.2")]

    async def ask(_sandbox: str, target: Target, said: Verdict, request: str | None) -> Verdict:
        proxy.asked.append(target)
        proxy.requests += [] if request is None else [request]
        if proxy.on_ask is not None:
            proxy.on_ask()
        return Verdict("allow", "a person said so", approval="apr-1") if said.verdict == "ask" else said

    report = Told()
    inspect = Inspection(roots=roots, idle_s=idle_s)
    outbound = Outbound(
        the_plan, resolve=resolve, dial=dial_directly, ask=ask, report=report, inspect=inspect, front=None
    )
    listener = socket.create_server(("127.0.0.1", 0))
    gateway = Gateway(listener, outbound)
    gateway.start()
    with trust(bundle(OWN)) as path:
        proxy = Proxy(outbound, report, listener.getsockname()[1], path)
        try:
            yield proxy
        finally:
            await gateway.drain(0.5)
            assert outbound.budget.open == 0
            assert sorted(map(id, report.accesses)) == sorted(map(id, report.ended))
            assert SECRET not in repr(report.accesses)


@contextmanager
def trust(text: str) -> Iterator[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
        file.write(text)
        file.flush()
        yield file.name


@asynccontextmanager
async def setting(
    reply: Callable[[Seen], Sequence[bytes | None]] = echo,
    *,
    injected: Sequence[Injected] = (CREDENTIAL,),
    **more: object,
) -> AsyncIterator[tuple[Site, Proxy]]:
    async with running(Site(reply)) as site, way_out(plan(site, injected, **more)) as proxy:
        yield site, proxy
