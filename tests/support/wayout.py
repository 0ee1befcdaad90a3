"""A gateway on loopback that stands for a sandbox's, with real rules, a table of names, and a report that remembers."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from carrel.egress.access import Access, AccessRefused, Address, Target
from carrel.egress.listener.gateway import Gateway
from carrel.egress.outbound.connections import Outbound
from carrel.egress.outbound.upstreams import dial_directly
from carrel.egress.plan import EgressPlan
from carrel.policy.documents import settings, sources
from carrel.policy.rules.layers import Layer
from carrel.policy.verdict import Verdict

OPEN, CLOSED = "127.0.0.2", "127.0.0.3"
"""Where allowed and forbidden servers are."""
PATIENCE_S = 20.0

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Records:
    """A `access.AccessRecorder`."""

    opened_: list[Access] = field(default_factory=list)
    closed_: list[Access] = field(default_factory=list)
    full: bool = False

    def opened(self, access: Access) -> None:
        if self.full:
            raise AccessRefused("the access log cannot be written", code="platform_error", status=503, retry=True)
        self.opened_.append(access)

    def closed(self, access: Access) -> None:
        assert any(each is access for each in self.opened_)
        assert not any(each is access for each in self.closed_)
        self.closed_.append(access)

    async def settled(self, count: int) -> list[Access]:
        """All accesses, once so many have ended."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.closed_) < count:
                await asyncio.sleep(0.005)
        return self.closed_


@dataclass
class Names:
    """A `access.Resolve` that knows a table, and counts."""

    table: dict[str, Sequence[str]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    async def __call__(self, name: str) -> Sequence[Address]:
        self.asked.append(name)
        if name not in self.table:
            raise AccessRefused(f"{name} is not known", code="unreachable", status=502)
        return [ip_address(each) for each in self.table[name]]


@dataclass
class Person:
    """A `access.Ask`."""

    says: Verdict = field(default_factory=lambda: Verdict("deny", "a person said no", approval="a1"))
    asked: list[Target] = field(default_factory=list)
    before: Callable[[], None] = lambda: None

    async def __call__(self, sandbox: str, target: Target, said: Verdict, request: str | None) -> Verdict:
        self.asked.append(target)
        self.before()
        return self.says


def plan(
    allow: Iterable[str] = (), deny: Iterable[str] = (), web: Mapping[str, Any] | None = None, **more: Any
) -> EgressPlan:
    """A plan whose rules allow and deny hosts, as `host[:port]`, addresses and networks."""
    said = {
        "permissions": {
            "allow": [f"network(outbound:{each})" for each in allow],
            "deny": [f"network(outbound:{each})" for each in deny],
        }
    }
    given = None if web is None else sources.load(json.dumps({"web_access": web}))
    return EgressPlan("s1", "c1", (Layer("test", settings.load(json.dumps(said)), given),), **more)


@dataclass
class Wayout:
    """A gateway that runs, and everything around it."""

    port: int
    outbound: Outbound
    gateway: Gateway
    records: Records
    names: Names
    person: Person

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def say(self, *pieces: bytes) -> bytes:
        """What comes back to the end, when these bytes are sent, each after the loop has turned."""
        reader, writer = await self.dial()
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            async with asyncio.timeout(PATIENCE_S):
                return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.close()

    async def tunnel(self, where: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A tunnel that is open."""
        reader, writer = await self.dial()
        writer.write(f"CONNECT {where} HTTP/1.1\r\nHost: {where}\r\n\r\n".encode())
        async with asyncio.timeout(PATIENCE_S):
            head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head
        return reader, writer


@asynccontextmanager
async def wayout(
    given: EgressPlan, names: Mapping[str, Sequence[str]] | None = None, person: Person | None = None, **more: Any
) -> AsyncIterator[Wayout]:
    """A gateway for a plan."""
    records, table, asked = Records(), Names(dict(names or {})), person or Person()
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    port = listener.getsockname()[1]
    arguments: dict[str, Any] = {"resolve": table, "dial": dial_directly, "ask": asked, "own_port": port}
    arguments |= {"front": None, "inspect": None, **more}  # tests that need the package index or inspection give them
    outbound = Outbound(given, report=records, **arguments)
    gateway = Gateway(listener, outbound)
    gateway.start()
    try:
        yield Wayout(port, outbound, gateway, records, table, asked)
    finally:
        await gateway.drain(0)
        assert outbound.budget.open == 0
        assert len(records.opened_) == len(records.closed_)


@asynccontextmanager
async def server(handler: Handler, host: str = OPEN, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A server that handles each connection so; its port."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    serving = await asyncio.start_server(handle, host, 0, ssl=tls)
    try:
        yield serving.sockets[0].getsockname()[1]
    finally:
        serving.close()
        await serving.wait_closed()


def tls_for(*names: str) -> tuple[ssl.SSLContext, str]:
    """A server's context with a certificate for the names, and that certificate as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    public = certificate.public_bytes(serialization.Encoding.PEM).decode()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    return _context(public, private), public


def _context(public: str, private: str) -> ssl.SSLContext:
    import tempfile

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(private + public)
        file.flush()
        context.load_cert_chain(file.name)
    return context


def hello(name: str | None) -> bytes:
    """The ClientHello that Python's TLS writes for a name."""
    context = ssl.create_default_context()
    context.check_hostname = False
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        context.wrap_bio(incoming, outgoing, server_hostname=name).do_handshake()
    except ssl.SSLWantReadError:
        pass
    return outgoing.read()
