"""Inspected tunnels, end to end: real clients, the real gateway, real TLS servers. No value of a credential comes back."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import logging
import os
import random
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from itertools import pairwise
from urllib.parse import quote

import httpx
import pytest
import uvloop
import websockets
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from carrel.egress.authority import Authority, bundle, make_authority
from carrel.egress.credentials import placeholder
from carrel.egress.gateway import Gateway
from carrel.egress.heads import Request, read_request
from carrel.egress.inspecting import Inspecting
from carrel.egress.passage import Passage
from carrel.egress.plan import Injected, Plan
from carrel.egress.streams import Body, Stream
from carrel.egress.terms import Access, Address, Refused, Said, Target
from carrel.egress.upstreams import dial_directly
from carrel.errors import InvalidRequest
from carrel.policy import settings, sources
from carrel.policy.layers import Layer

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

    request: Request
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
        stream = Stream(reader, writer, lambda: None)
        while head := await stream.head():
            request = read_request(head)
            if request.all(b"expect"):
                await stream.write(b"HTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n")
            body, reading = b"", Body(stream, request)
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

    passage: Passage
    report: Told
    port: int
    roots: str

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


def plan(site: Site, injected: Sequence[Injected] = (CREDENTIAL,), authority: str | None = OWN, **more: object) -> Plan:
    web = {
        "allowed_domains": ["api.test", "other.test"],
        "allowed_ports": [site.port],
        "inspected_domains": ["api.test", "other.test"],
        **more,
    }
    allowed = settings.load('{"permissions": {"allow": ["network(outbound:127.0.0.2)"]}}')
    own = sources.load(json.dumps({"web_access": {"enabled": True, **web}}))
    return Plan("s1", "c1", (Layer("settings.json", allowed, own),), tuple(injected), authority=authority)


@asynccontextmanager
async def way_out(
    the_plan: Plan, *, roots: str | None = PUBLIC.certificate, idle_s: float = 60.0
) -> AsyncIterator[Proxy]:
    async def resolve(_name: str) -> Sequence[Address]:
        return [IPv4Address("127.0.0.2")]

    async def ask(_sandbox: str, _target: Target, said: Said) -> Said:
        return Said("allow", "a person said so", approval="apr-1") if said.verdict == "ask" else said

    report = Told()
    inspect = Inspecting(roots=roots, idle_s=idle_s)
    passage = Passage(the_plan, resolve=resolve, dial=dial_directly, ask=ask, report=report, inspect=inspect)
    listener = socket.create_server(("127.0.0.1", 0))
    gateway = Gateway(listener, passage)
    gateway.start()
    with trust(bundle(OWN)) as path:
        try:
            yield Proxy(passage, report, listener.getsockname()[1], path)
        finally:
            await gateway.drain(0.5)
            assert passage.budget.open == 0
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


# credentials


async def test_the_server_gets_the_value_and_the_sandbox_does_not() -> None:
    async with setting() as (site, proxy), proxy.client() as client:
        answer = await client.post(
            f"https://api.test:{site.port}/v1/things?key=1",
            content=b"body",
            headers={"Authorization": f"Bearer {PLACEHOLDER}"},
        )
        assert answer.status_code == 200
        assert not spoken(answer.content)
        assert PLACEHOLDER in answer.text
        assert answer.content.endswith(b"body")
    (seen,) = site.seen
    assert seen.header("authorization") == [f"Bearer {SECRET}"]
    assert seen.header("accept-encoding") == ["identity"]
    assert seen.header("host") == [f"api.test:{site.port}"]
    tunnel, access = proxy.report.accesses
    assert (tunnel.protocol, tunnel.inspected) == ("connect", True)
    assert (access.method, access.path, access.inspected, access.credential) == ("POST", "/v1/things", True, "API_KEY")
    assert (access.said.verdict, access.address, access.result) == ("allow", "127.0.0.2", "ok")
    assert access.sent > 4
    assert access.received > len(answer.content)


async def test_curl_too() -> None:
    async with setting() as (site, proxy):
        code, output = await proxy.curl(f"https://api.test:{site.port}/", "-H", "Authorization: x", "-d", "a=b")
        assert (code, spoken(output)) == (0, False)
        assert output.startswith(b"HTTP/1.1 200 OK")
        assert output.endswith(b"a=b")
        big = os.urandom(3 << 20)
        with tempfile.NamedTemporaryFile() as file:
            file.write(big)
            file.flush()
            arguments = ("-T", file.name, "-H", "Expect: 100-continue")
            for more in ((), ("-H", "Transfer-Encoding: chunked")):
                code, output = await proxy.curl(f"https://api.test:{site.port}/put", *arguments, *more)
                assert code == 0
                assert output.endswith(big)
                assert site.seen[-1].body == big
    assert {seen.header("authorization")[0] for seen in site.seen} == {f"Bearer {SECRET}"}


async def test_only_the_named_method_and_path_get_it() -> None:
    one = Injected("api.test", "Authorization", f"Bearer {SECRET}", SECRET, "API_KEY", ("GET",), ("/v1",))
    async with setting(injected=[one]) as (site, proxy), proxy.client() as client:
        base = f"https://api.test:{site.port}"
        for method, path in (("GET", "/v1/a"), ("POST", "/v1/a"), ("GET", "/v2"), ("GET", "/v10")):
            await client.request(method, base + path, headers={"Authorization": PLACEHOLDER})
        assert [seen.header("authorization") for seen in site.seen] == [[f"Bearer {SECRET}"], *[[PLACEHOLDER]] * 3]
        assert [each.credential for each in proxy.report.requests] == ["API_KEY", None, None, None]
        code, output = await proxy.curl(f"{base}/v1/../admin", "--path-as-is")
        assert (code, output[:12]) == (0, b"HTTP/1.1 400")
        assert b"two ways" in output
        assert len(site.seen) == 4
        assert proxy.report.requests[-1].result == "bad_request"


async def test_another_host_gets_nothing_and_is_not_looked_at() -> None:
    def redirect(seen: Seen) -> Sequence[bytes]:
        if seen.header("host")[0].startswith("api."):
            return said(b"", b"Location: https://other.test:%d/x" % site.port, status=b"302 Found")
        return said(gzip.compress(b"hello"), b"Content-Encoding: gzip")

    both = Site(redirect)
    context = PUBLIC.context("api.test")
    context.sni_callback = lambda tls, name, _: setattr(tls, "context", PUBLIC.context(name))  # type: ignore[assignment]
    try:
        async with running(both, context) as site, way_out(plan(site)) as proxy, proxy.client() as client:
            client.follow_redirects = True
            answer = await client.get(f"https://api.test:{site.port}/")
            assert (answer.text, answer.headers["content-encoding"]) == ("hello", "gzip")
            assert answer.headers["content-length"] == str(len(gzip.compress(b"hello")))
            first, second = both.seen
            assert first.header("authorization")
            assert not second.header("authorization")
            assert "gzip" in second.header("accept-encoding")[0]
            assert [each.credential for each in proxy.report.requests] == ["API_KEY", None]
    finally:
        context.sni_callback = None


async def test_what_is_compressed_nevertheless_is_refused() -> None:
    def compressed(seen: Seen) -> Sequence[bytes]:
        return said(gzip.compress(seen.header("authorization")[0].encode()), b"Content-Encoding: gzip")

    async with setting(compressed) as (site, proxy), proxy.client() as client:
        answer = await client.get(f"https://api.test:{site.port}/")
        assert answer.status_code == 502
        assert "compressed" in answer.json()["reason"]
        assert proxy.report.requests[0].result == "bad_response"


async def test_parts_cannot_be_asked_for() -> None:
    async with setting() as (site, proxy), proxy.client() as client:
        await client.get(f"https://api.test:{site.port}/", headers={"Range": "bytes=0-5", "If-Range": "x"})
        assert not site.seen[0].header("range")
        assert not site.seen[0].header("if-range")


async def test_a_value_that_the_server_kept_does_not_come_back_later() -> None:
    one = Injected("api.test", "Authorization", f"Bearer {SECRET}", SECRET, "API_KEY", ("POST",))
    kept: list[bytes] = []

    def keep(seen: Seen) -> Sequence[bytes]:
        kept.extend(each.encode() for each in seen.header("authorization"))
        return said(b" ".join(kept), b"X-Kept: " + b"".join(kept), status=b"200 " + b"".join(kept))

    async with setting(keep, injected=[one]) as (site, proxy), proxy.client() as client:
        await client.post(f"https://api.test:{site.port}/")
        answer = await client.get(f"https://api.test:{site.port}/")
        assert kept
        assert not spoken(answer.content + repr(answer.headers).encode() + answer.extensions["reason_phrase"])
        assert answer.headers["x-kept"] == f"Bearer {PLACEHOLDER}"


@hypothesis_settings(max_examples=25, deadline=None)
@given(
    spelling=st.sampled_from(SPELLINGS),
    before=st.binary(max_size=40),
    after=st.binary(max_size=40),
    cuts=st.lists(st.integers(0, 140), max_size=12),
    way=st.sampled_from(["length", "chunks", "close"]),
    seed=st.integers(0, 99),
)
def test_however_it_is_sent_it_does_not_arrive(
    world: World, spelling: bytes, before: bytes, after: bytes, cuts: list[int], way: str, seed: int
) -> None:
    data = before + spelling + after
    edges = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    pieces = [data[start:end] for start, end in pairwise(edges)]

    def answer(_seen: Seen) -> Sequence[bytes | None]:
        if way == "length":
            return [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data), *pieces]
        if way == "close":
            return [b"HTTP/1.1 200 OK\r\n\r\n", *pieces, None]
        wire = b"".join(b"%x;ext=1\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
        wire += b"0\r\nX-Trailer: %s\r\n\r\n" % (b"" if b"\n" in spelling else spelling)
        places = sorted(random.Random(seed).choices(range(len(wire)), k=6))
        return [
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Echo: %s\r\n\r\n" % spelling,
            *(wire[start:end] for start, end in zip([0, *places], [*places, len(wire)], strict=True)),
        ]

    content, headers = world.get(answer)
    assert not spoken(content)
    assert not spoken(headers)
    if not spoken(before + after):
        assert PLACEHOLDER.encode() in content or b"***" in content


class World:
    """A site and a proxy that stay for many requests; on the proxy's own event loop."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._held = setting()
        self._site, self._proxy = self._runner.run(self._held.__aenter__())

    def get(self, reply: Callable[[Seen], Sequence[bytes | None]]) -> tuple[bytes, bytes]:
        """The body and the head as the client got them, undecoded."""
        self._site.reply = reply

        async def ask() -> tuple[bytes, bytes]:
            before = len(os.listdir("/proc/self/fd"))
            async with self._proxy.raw(self._site) as (reader, writer):
                writer.write(b"GET / HTTP/1.0\r\nConnection: close\r\n\r\n")
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            async with asyncio.timeout(10):
                while len(os.listdir("/proc/self/fd")) > before:  # the loop stands still between two requests
                    await asyncio.sleep(0.001)
            return body, head

        return self._runner.run(ask())

    def close(self) -> None:
        self._runner.run(self._held.__aexit__(None, None, None))
        self._runner.close()


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    found = World()
    yield found
    found.close()


async def test_a_few_bytes_that_could_begin_a_value_do_not_wait_for_more() -> None:
    go_on = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\ndata: " + SECRET[:1].encode())
        await go_on.wait()
        writer.write(SECRET[1:14].encode())

    async with running(Site(handler=slow)) as site, way_out(plan(site)) as proxy, proxy.raw(site) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: api.test:%d\r\n\r\n" % site.port)
        await reader.readuntil(b"\r\n\r\n")
        heard = b""
        while SECRET[:1].encode() not in heard:
            heard += await reader.read(100)
        go_on.set()


# who may be asked


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: other.test:PORT\r\n\r\n", 421),
        (b"GET https://other.test:PORT/ HTTP/1.1\r\nHost: api.test\r\n\r\n", 421),
        (b"GET / HTTP/1.1\r\nHost: api.test:1\r\n\r\n", 421),
        (b"GET / HTTP/1.1\r\nHost: api.test:PORT\r\nHost: other.test\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: api.test@other.test:PORT\r\n\r\n", 400),
        (b"GET http://api.test:PORT/ HTTP/1.1\r\nHost: api.test\r\n\r\n", 400),
        (b"GET /#x HTTP/1.1\r\nHost: api.test:PORT\r\n\r\n", 400),
        (b"GET x HTTP/1.1\r\nHost: api.test:PORT\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: \r\n\r\n", 400),
        (b"CONNECT api.test:PORT HTTP/1.1\r\nHost: api.test\r\n\r\n", 400),
        (b"TRACE / HTTP/1.1\r\nHost: api.test:PORT\r\n\r\n", 501),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: api.test:PORT\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: api.test:PORT\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
        (b"GET / HTTP/1.1\nHost: api.test:PORT\n\n\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: api.test:PORT\r\nX: a\r\n b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: api.test:PORT\r\nX: " + b"x" * 70_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: api.test:PORT\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", 403),
    ],
)  # fmt: skip
async def test_what_does_not_reach_the_server(request_: bytes, status: int) -> None:
    async with setting() as (site, proxy):
        async with proxy.raw(site) as (reader, writer):
            writer.write(request_.replace(b"PORT", b"%d" % site.port))
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
        (access,) = proxy.report.requests
        assert access.result != "ok"
        assert access.said.verdict == "deny"
    assert not site.seen


async def test_a_bad_body_is_refused_and_nothing_after_it_is_a_request() -> None:
    async with setting() as (site, proxy), proxy.raw(site) as (reader, writer):
        writer.write(
            b"POST / HTTP/1.1\r\nHost: api.test:%d\r\nTransfer-Encoding: chunked\r\n\r\n1\nx\r\n0\r\n\r\n" % site.port
        )
        writer.write(b"GET /smuggled HTTP/1.1\r\nHost: api.test:%d\r\n\r\n" % site.port)
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
    assert not site.seen


async def test_requests_come_one_after_the_other_over_one_connection() -> None:
    async with setting(injected=[]) as (site, proxy), proxy.raw(site) as (reader, writer):
        one = b"GET /%d HTTP/1.1\r\nHost: api.test:" + b"%d\r\n\r\n" % site.port
        writer.write(b"".join(one % number for number in range(5)))  # at once
        for _ in range(5):
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(size)
        writer.write(
            b"GET https://api.test:%d?q HTTP/1.1\r\nHost: api.test:%d\r\nConnection: close\r\n\r\n"
            % (site.port, site.port)
        )
        assert b"HTTP/1.1 200 OK" in await reader.read()
        assert site.connections == 1
    assert [seen.request.target for seen in site.seen] == ["/0", "/1", "/2", "/3", "/4", "/?q"]
    assert [access.path for access in proxy.report.requests] == ["/0", "/1", "/2", "/3", "/4", "/"]


async def test_head_and_answers_without_a_body() -> None:
    def bodiless(seen: Seen) -> Sequence[bytes]:
        if seen.request.method == "HEAD":
            return [b"HTTP/1.1 200 OK\r\nContent-Length: 1234\r\n\r\n"]
        return [b"HTTP/1.1 304 Not Modified\r\nETag: x\r\n\r\n"]

    for injected in ([], [CREDENTIAL]):
        async with setting(bodiless, injected=injected) as (site, proxy), proxy.client() as client:
            for _ in range(2):
                head = await client.head(f"https://api.test:{site.port}/")
                assert head.headers.get("content-length") == (None if injected else "1234")
                assert (await client.get(f"https://api.test:{site.port}/")).status_code == 304
            assert site.connections == 1


@pytest.mark.parametrize(
    "reply",
    [
        [None],
        [b"nonsense\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"],
        [b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"],
        [b"HTTP/1.1 103 Early Hints\r\n\r\n" * 20],
        [b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000],
    ],
    ids=["nothing", "nonsense", "lengths", "both", "switch", "interim", "long"],
)
async def test_a_server_that_makes_no_sense(reply: Sequence[bytes | None]) -> None:
    async with setting(lambda _seen: reply) as (site, proxy), proxy.client() as client:
        answer = await client.get(f"https://api.test:{site.port}/")
        assert answer.status_code == 502
        assert answer.json()["operation"] == "network"
        assert proxy.report.requests[0].result in ("bad_response", "unreachable")


@pytest.mark.parametrize(
    "reply",
    [
        [b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", None],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc", None],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcX\r\n"],
    ],
)
async def test_an_answer_that_is_cut_is_seen_to_be_cut(reply: Sequence[bytes | None]) -> None:
    async with setting(lambda _seen: reply) as (site, proxy), proxy.client() as client:
        with pytest.raises(httpx.TransportError):
            await client.get(f"https://api.test:{site.port}/")


async def test_an_early_answer_ends_the_connection() -> None:
    async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        await reader.read()

    async with running(Site(handler=early)) as site, way_out(plan(site)) as proxy, proxy.raw(site) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: api.test:%d\r\nContent-Length: 9\r\n\r\nabc" % site.port)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 413 Too Large\r\n")
        assert b"connection: close" in answer.lower()


async def test_a_client_that_does_not_read_does_not_fill_the_memory() -> None:
    written = 0

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (1 << 40))
        while True:
            writer.write(bytes(65536))
            await writer.drain()
            written += 65536

    async with running(Site(handler=endless)) as site, way_out(plan(site)) as proxy, proxy.raw(site) as (_, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: api.test:%d\r\n\r\n" % site.port)
        before = -1
        while before != written or not written:
            before = written
            await asyncio.sleep(0.3)
        assert written < 64 << 20


async def test_bytes_are_limited() -> None:
    async with (
        setting(lambda _seen: said(bytes(3 << 20)), max_download_mb=1) as (site, proxy),
        proxy.client() as client,
    ):
        with pytest.raises(httpx.TransportError):
            await client.get(f"https://api.test:{site.port}/")
        assert proxy.report.requests[0].result == "limit_exceeded"
    async with setting(max_upload_mb=1) as (site, proxy):
        with tempfile.NamedTemporaryFile() as file:
            file.write(bytes(3 << 20))
            file.flush()
            _, output = await proxy.curl(f"https://api.test:{site.port}/", "-T", file.name)
        assert b"HTTP/1.1 429" in output
        assert not site.seen


# WebSockets


async def test_websockets_pass_where_no_credential_is_put_in() -> None:
    one = Injected("api.test", "Authorization", f"Bearer {SECRET}", SECRET, "API_KEY", None, ("/v1",))

    async def talk(connection: websockets.ServerConnection) -> None:
        async for message in connection:
            await connection.send(message)

    site = Site()
    server = await websockets.serve(talk, "127.0.0.2", 0, ssl=PUBLIC.context("api.test"))
    site.port = server.sockets[0].getsockname()[1]
    try:
        async with way_out(plan(site, [one])) as proxy:
            context = ssl.create_default_context(cafile=proxy.roots)
            url = f"wss://api.test:{site.port}"
            async with websockets.connect(f"{url}/chat", ssl=context, proxy=proxy.url) as connection:
                for message in ("hello", "x" * 300_000, SECRET[:1]):
                    await connection.send(message)
                    assert await connection.recv() == message
                await connection.send(f"<{SECRET}>")  # as a server that knows it would
                with pytest.raises(websockets.ConnectionClosed):
                    while not spoken(str(await asyncio.wait_for(connection.recv(), 5)).encode()):
                        await connection.send("more" * 100)
            with pytest.raises(websockets.InvalidStatus, match="403"):
                await websockets.connect(f"{url}/v1/chat", ssl=context, proxy=proxy.url)
            assert [each.result for each in proxy.report.requests][1:] == ["denied_by_policy"]
    finally:
        server.close()
        await server.wait_closed()


# trust


async def test_a_server_nobody_vouches_for_is_told_of_in_words() -> None:
    async with running(Site()) as site:
        for roots, context in ((None, None), (PUBLIC.certificate, PUBLIC.context("other.test"))):
            async with (
                running(Site(), context) as site,
                way_out(plan(site), roots=roots) as proxy,
                proxy.client() as client,
            ):
                answer = await client.get(f"https://api.test:{site.port}/")
                assert answer.status_code == 502
                assert "its certificate is not valid" in answer.json()["reason"]
                assert not site.seen
                assert proxy.report.requests[0].result == "tls_failed"


async def test_a_server_without_tls_is_told_of_too() -> None:
    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad\r\n\r\n")

    async with running(Site(handler=plain, plain=True)) as site, way_out(plan(site)) as proxy, proxy.client() as client:
        answer = await client.get(f"https://api.test:{site.port}/")
        assert (answer.status_code, answer.json()["code"]) == (502, "tls_failed")


async def test_a_client_that_does_not_trust_gets_nothing() -> None:
    async with setting() as (site, proxy):
        async with httpx.AsyncClient(proxy=proxy.url, trust_env=False) as client:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await client.get(f"https://api.test:{site.port}/")
        while not proxy.report.ended:
            await asyncio.sleep(0.01)
        assert not proxy.report.requests
    assert not site.seen


async def test_a_sandbox_without_an_authority_is_refused() -> None:
    async with running(Site()) as site, way_out(plan(site, authority=None)) as proxy, proxy.client() as client:
        with pytest.raises(httpx.TransportError):
            await client.get(f"https://api.test:{site.port}/")
        assert proxy.report.accesses[0].result == "denied_by_policy"


async def test_an_idle_connection_ends() -> None:
    async with running(Site()) as site, way_out(plan(site), idle_s=0.3) as proxy, proxy.raw(site) as (reader, _writer):
        assert await reader.read() == b""


async def test_a_server_that_leaves_takes_the_client_along() -> None:
    async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async with running(Site(handler=leave)) as site, way_out(plan(site)) as proxy, proxy.raw(site) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: api.test:%d\r\n\r\n" % site.port)
        answer = await reader.read()
        assert b"200 OK" in answer
        assert b"connection: close" not in answer.lower()


# a policy that changes


async def test_a_new_plan_holds_for_the_next_request_and_cuts_what_it_denies() -> None:
    async with setting() as (site, proxy), proxy.client() as client:
        url = f"https://api.test:{site.port}/"
        await client.get(url)
        other = Injected("api.test", "X-Key", "another-value", "another-value", "OTHER")
        proxy.passage.change(plan(site, [other]))
        answer = await client.get(url)
        assert "another-value" not in answer.text
        assert site.seen[1].header("x-key") == ["another-value"]
        assert not site.seen[1].header("authorization")
        assert site.connections == 1
        proxy.passage.change(plan(site, blocked_domains=["api.test"]))
        with pytest.raises(httpx.TransportError):
            await client.get(url)
    assert len(site.seen) == 2


async def test_a_person_is_asked_once_for_a_tunnel() -> None:
    async with running(Site()) as site:
        asking = plan(site, allowed_domains=None)
        async with way_out(asking) as proxy, proxy.client() as client:
            for _ in range(3):
                assert (await client.get(f"https://api.test:{site.port}/")).status_code == 200
            assert {each.said.approval for each in proxy.report.accesses} == {"apr-1"}


# nothing is told


async def test_a_failure_of_ours_tells_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> bytes:
        raise RuntimeError(repr(given))

    monkeypatch.setattr("carrel.egress.inspecting.write_request", fail)
    with caplog.at_level(logging.DEBUG):
        async with setting() as (site, proxy), proxy.client() as client:
            answer = await client.get(f"https://api.test:{site.port}/")
            assert (answer.status_code, answer.json()["code"]) == (500, "platform_error")
            assert proxy.report.requests[0].result == "platform_error"
    assert "RuntimeError" in caplog.text
    assert not spoken(caplog.text.encode() + answer.content)


async def test_credentials_that_cannot_be_used_are_told_by_name() -> None:
    odd = Injected("api.test", "Authorization", "Bearer a\r\nb-secret", "a\r\nb-secret", "API_KEY")
    async with setting(injected=[odd]) as (site, proxy), proxy.client() as client:
        answer = await client.get(f"https://api.test:{site.port}/")
        assert (answer.status_code, answer.json()["code"]) == (502, "credential_unusable")
        assert "API_KEY" in answer.text
        assert "b-secret" not in answer.text
    assert not site.seen


def test_roots_that_cannot_be_read_are_refused_at_once() -> None:
    for text in ("", "nonsense"):
        with pytest.raises(InvalidRequest, match="roots"):
            Inspecting(roots=text)
    Inspecting(roots=PUBLIC.certificate)


async def test_who_refuses_is_told_why() -> None:
    """`Inspecting` is asked only for sandboxes with an authority."""
    async with running(Site()) as site, way_out(plan(site, authority=None)) as proxy:
        with pytest.raises(Refused, match="certificate authority"):
            Inspecting().authority(proxy.passage)
