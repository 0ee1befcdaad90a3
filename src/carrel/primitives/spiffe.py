"""SPIFFE IDs, and mutual TLS by them. Servers and supervisors use it, so it needs nothing but the standard library.

Makes no certificate and knows no peer: a caller says which IDs it accepts. Import it late: `ssl` costs memory.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

HANDSHAKE_S = 5.0
"""How long a handshake may take."""
SERVER_NAME = "carrel"
"""The name that clients send. It says nothing: peers are verified by their IDs, not by the names of hosts."""
LONGEST_ID, LONGEST_PEM = 2048, 256 * 1024
_TRUST_DOMAIN = re.compile(r"[a-z0-9._-]{1,255}")
_SEGMENT = re.compile(r"[A-Za-z0-9._-]+")
_NODE, _SANDBOX, _SLOT = "/carrel/node/", "/carrel/sandbox/", "/carrel/slot/"


@dataclass(frozen=True, slots=True)
class SpiffeId:
    """The identity of a workload. `path` begins with a slash."""

    trust_domain: str
    path: str

    @classmethod
    def parse(cls, text: str) -> SpiffeId:
        """Read an ID; `ValueError` when it is none."""
        domain, slash, path = text.removeprefix("spiffe://").partition("/")
        if not text.startswith("spiffe://") or len(text) > LONGEST_ID or not slash:
            raise ValueError(f"{text[:100]!r} is not a SPIFFE ID")
        return cls.of(domain, f"/{path}")

    @classmethod
    def of(cls, trust_domain: str, path: str) -> SpiffeId:
        """Return an ID of a trust domain; `ValueError` for what is not allowed in one."""
        segments = path[1:].split("/")
        if not _TRUST_DOMAIN.fullmatch(trust_domain):
            raise ValueError(f"{trust_domain[:100]!r} is not a trust domain")
        if path[:1] != "/" or not all(_SEGMENT.fullmatch(each) and each not in {".", ".."} for each in segments):
            raise ValueError(f"{path[:100]!r} is not the path of a SPIFFE ID")
        return cls(trust_domain, path)

    @classmethod
    def node(cls, trust_domain: str, name: str) -> SpiffeId:
        """Return the ID of a server."""
        return cls.of(trust_domain, _NODE + name)

    @classmethod
    def sandbox(cls, trust_domain: str, id: str) -> SpiffeId:
        """Return the ID of a sandbox."""
        return cls.of(trust_domain, _SANDBOX + id)

    @classmethod
    def slot(cls, trust_domain: str, id: str) -> SpiffeId:
        """Return the ID of a supervisor that belongs to nobody yet."""
        return cls.of(trust_domain, _SLOT + id)

    @property
    def node_name(self) -> str | None:
        """The name of the server that this is the ID of; None if it is another one."""
        name = self.path.removeprefix(_NODE)
        return name if name != self.path and "/" not in name else None

    def __str__(self) -> str:
        return f"spiffe://{self.trust_domain}{self.path}"


@dataclass(frozen=True, slots=True)
class Svid:
    """An X.509 SVID with its key, and the certificates by which peers are verified. All are PEM texts; a chain begins
    with the SVID. Times are seconds since the epoch.
    """

    id: str
    chain: str
    key: str = field(repr=False)
    bundle: str
    issued_at: float
    expires_at: float

    def to_json(self) -> str:
        """Return a text for `from_json`. It has the key: whoever reads it is this workload."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Svid:
        """Read what `to_json` has written; `ValueError`, which quotes nothing of it."""
        try:
            return cls.of(json.loads(text))
        except RecursionError:
            raise ValueError("these are no credentials") from None

    @classmethod
    def of(cls, value: object) -> Svid:
        """Check a value of JSON; `ValueError`."""
        texts, times = ("id", "chain", "key", "bundle"), ("issued_at", "expires_at")
        if not isinstance(value, dict) or value.keys() != {*texts, *times}:
            raise ValueError("these are no credentials")
        if not all(isinstance(value[each], str) and len(value[each]) <= LONGEST_PEM for each in texts):
            raise ValueError("credentials must be texts")
        if not all(type(value[each]) in {int, float} for each in times):
            raise ValueError("the times of credentials must be numbers")
        SpiffeId.parse(value["id"])
        return cls(**value)


def server_context(credentials: Svid) -> ssl.SSLContext:
    """Return a context for a listener: TLS 1.3, and no peer without a certificate. `ValueError` for bad credentials."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # a resumed session would not show its certificate again
    return _filled(context, credentials)


def client_context(credentials: Svid) -> ssl.SSLContext:
    """Return a context for connections. Whoever uses it compares the peer's ID: see `peer_of`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    return _filled(context, credentials)


def _filled(context: ssl.SSLContext, credentials: Svid) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    # `ssl` takes the chain and the key from a file only: this one is in memory, and gone afterwards.
    file = os.memfd_create("credentials", os.MFD_CLOEXEC)
    try:
        os.write(file, f"{credentials.chain}\n{credentials.key}\n".encode())
        context.load_cert_chain(f"/proc/self/fd/{file}")
        context.load_verify_locations(cadata=credentials.bundle)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"the credentials of {credentials.id} cannot be used: {type(error).__name__}") from None
    finally:
        os.close(file)
    return context


def peer_of(transport: asyncio.BaseTransport) -> SpiffeId:
    """Return the ID in the verified certificate of a peer; `ValueError` if it has not exactly one."""
    tls = transport.get_extra_info("ssl_object")
    certificate = None if tls is None else tls.getpeercert()
    names = (certificate or {}).get("subjectAltName", ())
    found = [text for kind, text in names if kind == "URI"]
    if len(found) != 1:
        raise ValueError("the certificate of the peer is not an SVID: it has not exactly one URI")
    return SpiffeId.parse(found[0])


def require_peer(transport: asyncio.BaseTransport, accepts: Callable[[SpiffeId], bool]) -> SpiffeId:
    """Return the ID of a peer; abort the connection and raise `PermissionError` if it is not an accepted one."""
    try:
        peer = peer_of(transport)
    except ValueError as error:
        transport.abort()  # type: ignore[attr-defined]
        raise PermissionError(str(error)) from None
    if not accepts(peer):
        transport.abort()  # type: ignore[attr-defined]
        raise PermissionError(f"the peer is {peer}, which is not accepted here")
    return peer


async def connect(
    protocol: Callable[[], asyncio.Protocol],
    host: str,
    port: int,
    context: ssl.SSLContext,
    accepts: Callable[[SpiffeId], bool],
) -> asyncio.Transport:
    """Open a connection to a peer with an accepted ID. Raises `OSError` or `TimeoutError`."""
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_connection(
        protocol, host, port, ssl=context, server_hostname=SERVER_NAME, ssl_handshake_timeout=HANDSHAKE_S
    )
    require_peer(transport, accepts)
    return transport
