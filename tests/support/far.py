"""Everything outside, on this machine's loopback: servers that a sandbox may reach and servers that it may not, and the
names of both. All remember who came and what was said, so that a test need not believe what the sandbox says.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import shutil
import socket
import ssl
import struct
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset
from tests.support.indexes import IndexServer
from tests.support.indexes import serving as indexing
from tests.support.wayout import tls_for

T = TypeVar("T")

ALLOWED, FORBIDDEN, LOCAL, LOCAL6 = "127.0.0.2", "127.0.0.3", "127.0.0.1", "::1"
EARS = (LOCAL, ALLOWED, FORBIDDEN)
"""Where nothing may come by UDP."""
HOSTS = ("allowed.test", "inspected.test", "opaque.test", "good.names.test", ALLOWED)
"""What the sandbox may speak of."""

NAMES = {
    "allowed.test": ["A 127.0.0.2"],
    "inspected.test": ["A 127.0.0.2"],
    "opaque.test": ["A 127.0.0.2"],
    "forbidden.test": ["A 127.0.0.3"],
    "blocked.test": ["A 127.0.0.3"],
    # From here on the names are allowed, and what they lead to is not.
    "good.names.test": ["A 127.0.0.2"],
    "good-cname.names.test": ["CNAME allowed.test.", "A 127.0.0.2"],
    "elsewhere.names.test": ["A 127.0.0.3"],
    "cname.names.test": ["CNAME forbidden.test.", "A 127.0.0.3"],
    "chain.names.test": ["CNAME good.names.test.", "CNAME forbidden.test.", "A 127.0.0.3"],
    "mixed.names.test": ["A 127.0.0.2", "A 127.0.0.3"],
    "mixed-after.names.test": ["A 127.0.0.3", "A 127.0.0.2"],
    "mixed6.names.test": ["A 127.0.0.2", "AAAA ::1"],
    "loopback.names.test": ["A 127.0.0.1"],
    "loopback6.names.test": ["AAAA ::1"],
    "unspecified.names.test": ["A 0.0.0.0"],
    "unspecified6.names.test": ["AAAA ::"],
    "mapped.names.test": ["AAAA ::ffff:127.0.0.3"],
    "compatible.names.test": ["AAAA ::127.0.0.3"],
    "translated.names.test": ["AAAA ::ffff:0:127.0.0.3"],
    "nat64.names.test": ["AAAA 64:ff9b::7f00:3"],
    "nat64-local.names.test": ["AAAA 64:ff9b:1::7f00:3"],
    "6to4.names.test": ["AAAA 2002:7f00:3::1"],
    "teredo.names.test": ["AAAA 2001:0:7f00:3::1"],
    "private.names.test": ["A 10.0.0.1"],
    "private172.names.test": ["A 172.16.0.1"],
    "private192.names.test": ["A 192.168.0.1"],
    "metadata.names.test": ["A 169.254.169.254"],
    "metadata6.names.test": ["AAAA fd00:ec2::254"],
    "carrier.names.test": ["A 100.64.0.1"],
    "multicast.names.test": ["A 224.0.0.1"],
    "broadcast.names.test": ["A 255.255.255.255"],
    "link6.names.test": ["AAAA fe80::1"],
    "unique6.names.test": ["AAAA fd12:3456::1"],
}


@dataclass
class Request:
    """A request as a server read it."""

    line: str
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def target(self) -> str:
        return self.line.split(" ")[1]

    def all(self, name: str) -> list[str]:
        return [value for known, value in self.headers if known == name]


@dataclass
class Visit:
    """A connection that came to a server, or a datagram."""

    site: str
    plain: bool
    raw: bytearray = field(default_factory=bytearray)
    requests: list[Request] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def forbidden(self) -> bool:
        return self.site.startswith("forbidden")

    @property
    def after(self) -> str:
        """The target, when it was only to see whether the way out still works."""
        return next((each.target for each in self.requests if each.target.startswith("/after/")), "")


_NEVER_PASSED_ON = {"te", "trailer", "keep-alive", "proxy-connection", "proxy-authorization", "http2-settings"}
_CHUNK = re.compile(rb"([0-9a-f]+)\r\n")


class Far:
    """The outside, in a thread of its own."""

    def __init__(self) -> None:
        self.token = f"forbidden-{secrets.token_hex(8)}"
        self.visits: list[Visit] = []
        self.names: list[tuple[int, str]] = []
        """The names in TLS hellos, as servers read them, and after how many visits."""
        self.asked: list[tuple[int, str]] = []
        """The names somebody wanted the address of, and after how many visits."""
        self.nameserver = ""
        self.http = self.tls = self.retry = self.other = 0
        self.index, self.second_index = IndexServer(), IndexServer()
        self.certificate = ""
        self._released = asyncio.Event()
        self._answers: Counter[str] = Counter()
        self._directory = tempfile.mkdtemp(prefix="far-")
        self._loop = asyncio.new_event_loop()
        self._stack = AsyncExitStack()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.do(self._open())

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Have it done out there."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def close(self) -> None:
        try:
            self.do(self._close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            shutil.rmtree(self._directory)

    def release(self) -> None:
        """Answer those who ask for `/held`, from now on."""
        self._loop.call_soon_threadsafe(self._released.set)

    # what came

    def mark(self) -> int:
        """This moment: what came later is told from what came before."""
        return len(self.visits)

    def since(self, mark: int) -> list[Visit]:
        """Who came, without those that only see whether the way out still works."""
        return [each for each in self.visits[mark:] if not each.after]

    def asked_since(self, mark: int) -> list[str]:
        """The names that were asked for."""
        return [name for at, name in list(self.asked) if at >= mark]

    def place_of(self, after: str) -> int:
        """Which of all visits was the one with this request."""
        return next(at for at, visit in enumerate(self.visits) if visit.after == after)

    # servers

    async def _open(self) -> None:
        stack = self._stack
        context, self.certificate = tls_for("allowed.test", "inspected.test", "opaque.test", "forbidden.test")
        await self._names()
        sites: dict[str, tuple[str, ...]] = {"http": (ALLOWED, FORBIDDEN, LOCAL, LOCAL6), "other": (ALLOWED,)}
        for kind, hosts in sites.items():
            port, sockets, ears = _bind(hosts, EARS if kind == "http" else ())
            setattr(self, kind, port)
            await self._hear(ears)
            for host, one in zip(hosts, sockets, strict=True):
                site = f"allowed {kind}" if (kind, host) == ("http", ALLOWED) else f"forbidden {kind} {host}"
                await stack.enter_async_context(_listening(partial(self._serve, site), sock=one))
        self.tls, sockets, ears = _bind((ALLOWED, FORBIDDEN, LOCAL), EARS)
        await self._hear(ears)
        for host, one in zip((ALLOWED, FORBIDDEN, LOCAL), sockets, strict=True):
            await self._secure("allowed tls" if host == ALLOWED else f"forbidden tls {host}", one, context)
        self.retry, sockets, _ = _bind((ALLOWED,))
        picky, _ = tls_for("allowed.test")
        picky.set_ecdh_curve("secp384r1")  # nobody's first choice: every client is asked to begin again
        await self._secure("allowed retry", sockets[0], picky)
        for index in (self.index, self.second_index):
            await stack.enter_async_context(indexing(index))

    async def _hear(self, ears: list[socket.socket]) -> None:
        for one in ears:
            ear = partial(_Ear, self.visits, f"forbidden udp {one.getsockname()[0]}")
            transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(ear, sock=one)
            self._stack.callback(transport.close)

    async def _close(self) -> None:
        await self._stack.aclose()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0.01)  # transports that were told to close do

    async def _secure(self, site: str, listener: socket.socket, context: ssl.SSLContext) -> None:
        """A TLS server behind a listener that remembers every byte, also those that no TLS comes of."""

        def named(_connection: ssl.SSLObject, name: str | None, _context: ssl.SSLContext) -> None:
            self.names.append((len(self.visits), name or ""))

        context.sni_callback = named  # type: ignore[assignment]
        path = f"{self._directory}/{len(self._directory)}{site.replace(' ', '-')}"
        handler = self._tracked(partial(self._serve, site))
        inner = await asyncio.start_unix_server(handler, path, ssl=context)
        self._stack.push_async_callback(_end, inner)
        await self._stack.enter_async_context(_listening(self._tracked(partial(self._tap, site, path)), sock=listener))

    def _tracked(self, handler: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., Coroutine[Any, Any, None]]:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            try:
                await handler(reader, writer)
            finally:
                self._tasks.discard(task)

        return handle

    async def _tap(self, site: str, path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visit = Visit(site, plain=False)
        self.visits.append(visit)
        with suppress(OSError, asyncio.CancelledError):
            inward, outward = await asyncio.open_unix_connection(path)
            try:
                await asyncio.gather(_copy(reader, outward, visit.raw), _copy(inward, writer))
            finally:
                outward.close()
        writer.close()

    async def _serve(self, site: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visit = Visit(site, plain=True)
        self.visits.append(visit)
        rest = b""
        with suppress(OSError, asyncio.CancelledError):
            while data := await reader.read(65536):
                visit.raw += data
                rest += data
                while (found := _read(rest, visit.faults)) is not None:
                    request, rest = found
                    visit.requests.append(request)
                    if request.target == "/held":
                        await self._released.wait()
                        self._released.clear()
                    writer.write(self._answer(visit, request))
                    await writer.drain()
                    if request.all("connection") == ["close"]:
                        break
                else:
                    continue
                break
        with suppress(OSError):
            writer.close()

    def _answer(self, visit: Visit, request: Request) -> bytes:
        path, _, query = request.target.partition("?")
        if path == "/websocket" and request.all("upgrade"):
            return b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        if path == "/switch":
            return b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
        if path == "/redirect":
            return b"HTTP/1.1 302 Found\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n" % query.encode()
        body = (self.token if visit.forbidden else f"welcome to {path}").encode()
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)

    # names

    async def _names(self) -> None:
        port, [stream], [datagrams] = _bind((LOCAL,), (LOCAL,))
        streams = await asyncio.start_server(self._asked_by_stream, sock=stream)
        self._stack.push_async_callback(_end, streams)
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: _Resolver(self._say), sock=datagrams
        )
        self._stack.callback(transport.close)
        self.nameserver = f"{LOCAL}:{port}"

    async def _asked_by_stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            (size,) = struct.unpack("!H", await reader.readexactly(2))
            answer = self._say(await reader.readexactly(size))
            writer.write(struct.pack("!H", len(answer)) + answer)
            await writer.drain()
        writer.close()

    def _say(self, data: bytes) -> bytes:
        query = dns.message.from_wire(data)
        question = query.question[0]
        name, kind = question.name.to_text(omit_final_dot=True), dns.rdatatype.to_text(question.rdtype)
        self.asked.append((len(self.visits), name))
        answer = dns.message.make_response(query)
        records = NAMES.get(name.lower())
        if name.startswith("rebinding") and kind == "A":
            # The first who asks gets an address that is allowed, every other one that is not.
            self._answers[name] += 1
            records = ["A 127.0.0.2" if self._answers[name] == 1 else "A 127.0.0.3"]
        if records is None:
            answer.set_rcode(dns.rcode.NOERROR if name.startswith("rebinding") else dns.rcode.NXDOMAIN)
        owner = question.name
        for text in records or ():
            made, _, value = text.partition(" ")
            if made in ("CNAME", kind):
                answer.answer.append(dns.rrset.from_text(owner, 60, "IN", made, value))
            if made == "CNAME":
                owner = dns.name.from_text(value)
        return answer.to_wire()


class _Ear(asyncio.DatagramProtocol):
    def __init__(self, visits: list[Visit], site: str):
        self._visits, self._site = visits, site

    def datagram_received(self, data: bytes, _sender: object) -> None:
        self._visits.append(Visit(self._site, plain=False, raw=bytearray(data)))


class _Resolver(asyncio.DatagramProtocol):
    def __init__(self, say: Callable[[bytes], bytes]):
        self._say = say

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, sender: object) -> None:
        self._transport.sendto(self._say(data), sender)  # type: ignore[attr-defined]


def _bind(hosts: tuple[str, ...], ears: tuple[str, ...] = ()) -> tuple[int, list[socket.socket], list[socket.socket]]:
    """The same port of several addresses, and of UDP at `ears`: so it is never the port that keeps somebody out."""
    wanted = [*((host, socket.SOCK_STREAM) for host in hosts), *((host, socket.SOCK_DGRAM) for host in ears)]
    for _ in range(100):
        sockets: list[socket.socket] = []
        try:
            for host, kind in wanted:
                one = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, kind)
                sockets.append(one)
                one.bind((host, sockets[0].getsockname()[1] if len(sockets) > 1 else 0))
        except OSError:
            for one in sockets:
                one.close()
            continue
        return sockets[0].getsockname()[1], sockets[: len(hosts)], sockets[len(hosts) :]
    raise AssertionError("no port is free on all of these addresses")


@asynccontextmanager
async def _listening(handler: Any, **where: Any) -> AsyncIterator[None]:
    server = await asyncio.start_server(handler, **where)
    try:
        yield
    finally:
        await _end(server)


async def _end(server: asyncio.Server) -> None:
    server.close()
    await server.wait_closed()


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter, kept: bytearray | None = None) -> None:
    while data := await source.read(65536):
        if kept is not None:
            kept += data
        sink.write(data)
        await sink.drain()
    with suppress(OSError, RuntimeError):
        sink.write_eof()


def _read(data: bytes, faults: list[str]) -> tuple[Request, bytes] | None:
    """The first whole request of the bytes and what follows it. What could be read in another way is a fault."""
    head, found, rest = data.partition(b"\r\n\r\n")
    if not found:
        return None
    if re.search(rb"(?<!\r)\n|\r(?!\n)|\0|\r\n[ \t]", head):
        faults.append(f"an odd line in {head!r}")
    line, *lines = head.decode("latin-1").split("\r\n")
    headers = [(name.lower(), value.strip()) for name, _, value in (each.partition(":") for each in lines)]
    request = Request(line, headers, b"")
    names = Counter(name for name, _ in headers)
    lengths, codings = request.all("content-length"), request.all("transfer-encoding")
    if names["host"] != 1 or len(lengths) + len(codings) > 1 or codings not in ([], ["chunked"]):
        faults.append(f"an unclear head: {head!r}")
    if passed := _NEVER_PASSED_ON & names.keys():
        faults.append(f"passed on: {passed}")
    if not re.fullmatch(r"[A-Z]+ (/\S*|\*) HTTP/1\.1", line):
        faults.append(f"an odd request line: {line!r}")
    if codings:
        while chunk := _CHUNK.match(rest):
            size = int(chunk[1], 16)
            if len(rest) < chunk.end() + size + 2:
                return None
            request.body += rest[chunk.end() : chunk.end() + size]
            rest = rest[chunk.end() + size + 2 :]
            if not size:
                return request, rest
        return None
    size = int(lengths[0]) if lengths else 0
    if len(rest) < size:
        return None
    request.body, rest = rest[:size], rest[size:]
    return request, rest
