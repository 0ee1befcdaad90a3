"""Reads the first bytes of a client: a SOCKS5 request (RFC 1928) or a TLS ClientHello.

SOCKS5 without authentication, because the socket is the identity, and CONNECT only. Hellos are read more strictly than
servers do: what two programs could read differently is refused. Pure: knows no sockets and keeps nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address

from carrel.egress.access import AccessRefused, BadRequest, Target
from carrel.egress.outbound.names import of_address, read_host

SOCKS_VERSION = 5
MOST_SOCKS = 512
"""No SOCKS message is longer."""

SOCKS_NO_METHOD = b"\x05\xff"
SOCKS_NO_AUTHENTICATION = b"\x05\x00"

_CONNECT = 1
_V4, _NAME, _V6 = 1, 3, 4
_FAILED, _NO_SUCH_COMMAND, _NO_SUCH_ADDRESS = 1, 7, 8


@dataclass(frozen=True, slots=True)
class SocksRequest:
    """A SOCKS request: its size, and its target or the code of the failure to reply with."""

    size: int
    target: Target | None
    code: int = 0
    refusal: AccessRefused | None = None


def read_socks_greeting(data: bytes) -> tuple[int, bool] | None:
    """Return the size of the greeting, and whether it offers no authentication; None when more bytes are needed."""
    if len(data) < 2 or len(data) < 2 + data[1]:
        return None
    size = 2 + data[1]
    return size, 0 in data[2:size]


def read_socks_request(data: bytes) -> SocksRequest | None:
    """Read the request after the greeting; None when more bytes are needed."""
    if len(data) < 5:
        return None
    version, command, reserved, kind = data[:4]
    length = {_V4: 4, _NAME: 1 + data[4], _V6: 16}.get(kind)
    if version != SOCKS_VERSION or reserved != 0:
        return _no(len(data), _FAILED, "the SOCKS request is not valid")
    if length is None:
        return _no(len(data), _NO_SUCH_ADDRESS, "the SOCKS request has an address of no known kind")
    size = 4 + length + 2
    if len(data) < size:
        return None
    if command != _CONNECT:
        return _no(size, _NO_SUCH_COMMAND, "only connections can be made: neither BIND nor UDP is offered")
    port = int.from_bytes(data[size - 2 : size], "big")
    try:
        return SocksRequest(size, _target(kind, data[4 : size - 2], port))
    except AccessRefused as refusal:
        return SocksRequest(size, None, _FAILED, refusal)


def _target(kind: int, address: bytes, port: int) -> Target:
    if not port:
        raise BadRequest("0 is not a port")
    if kind == _NAME:
        return read_host(address[1:], port)
    return of_address(IPv4Address(address) if kind == _V4 else IPv6Address(address), port)


def _no(size: int, code: int, reason: str) -> SocksRequest:
    return SocksRequest(size, None, code, BadRequest(reason))


def socks_reply(code: int) -> bytes:
    """Return the reply to a request. It does not tell the address from which the proxy connects."""
    return bytes((SOCKS_VERSION, code, 0, _V4, 0, 0, 0, 0, 0, 0))


MOST_HELLO = 64 * 1024
"""The size limit of a hello, record headers included."""

_CHANGE_CIPHER, _HANDSHAKE, _DATA = 20, 22, 23
_CLIENT_HELLO, _SERVER_HELLO = 1, 2
_MAX_RECORD = 1 << 14
_SERVER_NAME, _PROTOCOLS, _PRE_SHARED_KEY, _EARLY_DATA = 0, 16, 41, 42
_ENCRYPTED = frozenset({0xFE0D, 0xFD00, 0xFFCE})
"""Encrypted ClientHello, its inner marker and its predecessor. A dummy one (GREASE) looks the same."""

_AGAIN = bytes.fromhex("cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c")
"""The random number of a HelloRetryRequest, in which a server asks for another hello (RFC 8446, 4.1.3)."""


class NotTls(BadRequest):
    """The bytes are not TLS."""

    def __init__(self) -> None:
        super().__init__("the connection does not begin with TLS")


class Malformed(BadRequest):
    """The bytes begin like TLS, but are not a hello that has only one meaning."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the TLS hello is not valid: {reason}")


@dataclass(frozen=True, slots=True)
class Hello:
    """The content of a ClientHello. `name`: of the server, None when it has none. `encrypted`: another name may be
    inside that the proxy cannot read. `early`: data of the first request follows.
    """

    name: str | None
    encrypted: bool
    protocols: tuple[str, ...] = ()
    early: bool = False
    size: int = field(default=0, compare=False)
    """Record headers included."""


def read_hello(data: bytes | memoryview) -> Hello | None:
    """Read the hello at the start of the bytes; None when more bytes are needed. Raises `NotTls` or `Malformed`."""
    found = _message(memoryview(data))
    return None if found is None else _hello(_ByteReader(found[0]), found[1])


def wants_another(data: bytes) -> int | None:
    """Return the size of the record in which a server asks for another hello, given its first bytes: the server then
    uses the name in that second hello. 0 when it does not ask; None when more bytes are needed. Raises `Malformed`.
    """
    if data[0] != _HANDSHAKE:
        return 0
    if len(data) < 6:
        return None
    if data[5] != _SERVER_HELLO:
        return 0
    size = int.from_bytes(data[3:5], "big")
    if size < 38:
        raise Malformed("the server's is cut into too small pieces")
    if len(data) < 43:
        return None
    return 5 + size if data[11:43] == _AGAIN else 0


def read_second(data: bytes) -> Hello | None:
    """Read the second hello of a client; None when more bytes are needed. A change of ciphers, which means nothing, and
    early data may come before it. Raises `NotTls` or `Malformed`.
    """
    at = 0
    while data[at : at + 1] in (bytes((_CHANGE_CIPHER,)), bytes((_DATA,))):
        if len(data) < at + 5:
            return None
        at += 5 + int.from_bytes(data[at + 3 : at + 5], "big")
    if at > MOST_HELLO:
        raise Malformed("too much comes before it")
    return read_hello(data[at:]) if at < len(data) else None


def _message(data: memoryview) -> tuple[bytes, int] | None:
    """Return the body of the first handshake message, joined from its records, and the size of these."""
    found = bytearray()
    at = 0
    while True:
        head = data[at : at + 5]
        _check_head(head, first=at == 0)
        if len(head) < 5:
            break
        size = int.from_bytes(head[3:5], "big")
        if not 0 < size <= _MAX_RECORD:
            raise Malformed("a record is empty or too long")
        declared = len(found) + size
        found += data[at + 5 : at + 5 + size]
        if found and found[0] != _CLIENT_HELLO:
            raise Malformed("the first message is not a hello")
        at += 5 + size
        if len(found) >= 4:
            wanted = 4 + int.from_bytes(found[1:4], "big")
            if max(wanted, at) > MOST_HELLO:
                raise Malformed("it is too long")
            if declared > wanted:
                raise Malformed("another message follows in the same record")
            if len(found) == wanted:
                return bytes(found[4:]), at
        if at >= len(data):
            break
    if len(data) >= MOST_HELLO:
        raise Malformed("it is too long")
    return None


def _check_head(head: memoryview, *, first: bool) -> None:
    """Check the part of a record's head that has arrived."""
    if first and head and head[0] & 0x80:
        if len(head) >= 3 and head[2] == _CLIENT_HELLO:
            raise Malformed("it is of SSL 2")
        if len(head) >= 3:
            raise NotTls
    elif head and head[0] != _HANDSHAKE:
        raise NotTls if first else Malformed("another kind of record comes before its end")
    elif len(head) >= 2 and head[1] != 3:
        raise NotTls if first else Malformed("a record is of no version of TLS")
    elif len(head) >= 3 and head[2] > 4:
        raise Malformed("a record is of no version of TLS")


class _ByteReader:
    """Reads from the front of bytes. Raises `Malformed` when there are too few."""

    def __init__(self, data: bytes):
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        taken = self._data[self._at : self._at + count]
        if len(taken) < count:
            raise Malformed("it ends too early")
        self._at += count
        return taken

    def number(self, width: int) -> int:
        return int.from_bytes(self.take(width), "big")

    def vector(self, width: int) -> _ByteReader:
        return _ByteReader(self.take(self.number(width)))

    def __len__(self) -> int:
        return len(self._data) - self._at


def _hello(body: _ByteReader, size: int) -> Hello:
    if body.number(2) >> 8 != 3:
        raise Malformed("it is of no version of TLS")
    body.take(32)
    if len(body.vector(1)) > 32:
        raise Malformed("the session's id is too long")
    suites = body.vector(2)
    if len(suites) < 2 or len(suites) % 2:
        raise Malformed("the list of ciphers is broken")
    compressions = body.vector(1)
    if 0 not in compressions.take(len(compressions)):
        raise Malformed("it does not offer to go without compression")
    name: str | None = None
    protocols: tuple[str, ...] = ()
    encrypted = early = False
    for kind, content in _extensions(body):
        if kind == _SERVER_NAME:
            name = _server_name(content)
        elif kind == _PROTOCOLS:
            protocols = _protocols(content)
        elif kind in _ENCRYPTED:
            encrypted = True
        elif kind == _EARLY_DATA:
            early = True
    return Hello(name, encrypted, protocols, early, size)


def _extensions(body: _ByteReader) -> Iterator[tuple[int, _ByteReader]]:
    if not len(body):
        return
    extensions = body.vector(2)
    if len(body):
        raise Malformed("bytes follow its end")
    seen: set[int] = set()
    while len(extensions):
        kind = extensions.number(2)
        if kind in seen:
            raise Malformed("an extension is there twice")
        if _PRE_SHARED_KEY in seen:
            raise Malformed("an extension follows the one that must be the last")
        seen.add(kind)
        yield kind, extensions.vector(2)


def _server_name(content: _ByteReader) -> str:
    names = content.vector(2)
    if len(content):
        raise Malformed("bytes follow the server's name")
    kind = names.number(1)
    text = names.vector(2)
    if kind != 0 or len(names):
        raise Malformed("it must hold one server name")
    try:
        target = read_host(text.take(len(text)), 443)
    except AccessRefused as error:
        raise Malformed(error.reason) from None
    if target.literal is not None:
        raise Malformed("the server's name is an address")
    return target.host


def _protocols(content: _ByteReader) -> tuple[str, ...]:
    names = content.vector(2)
    if len(content) or not len(names):
        raise Malformed("the list of protocols is broken")
    found = []
    while len(names):
        name = names.vector(1)
        if not len(name):
            raise Malformed("the name of a protocol is empty")
        found.append(name.take(len(name)).decode("latin-1"))
    return tuple(found)
