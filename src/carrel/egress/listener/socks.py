"""SOCKS5 as a sandbox speaks it (RFC 1928): no authentication, since the socket is the identity, and CONNECT alone.

Pure: reads bytes, writes bytes, knows no sockets.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

from carrel.egress.access import Refused, Target
from carrel.egress.outbound.names import of_address, read_host

VERSION = 5
MOST = 512
"""More than the longest message there is."""

NO_METHOD = b"\x05\xff"
NO_AUTHENTICATION = b"\x05\x00"

_CONNECT = 1
_V4, _NAME, _V6 = 1, 3, 4
FAILED, NO_SUCH_COMMAND, NO_SUCH_ADDRESS = 1, 7, 8


@dataclass(frozen=True, slots=True)
class Order:
    """What a client wants: a target, or the number of why not."""

    size: int
    target: Target | None
    code: int = 0
    refusal: Refused | None = None


def read_greeting(data: bytes) -> tuple[int, bool] | None:
    """How long the greeting is, and whether it offers to go without authentication. None: more bytes are needed."""
    if len(data) < 2 or len(data) < 2 + data[1]:
        return None
    size = 2 + data[1]
    return size, 0 in data[2:size]


def read_order(data: bytes) -> Order | None:
    """What the client asks for. None: more bytes are needed."""
    if len(data) < 5:
        return None
    version, command, reserved, kind = data[:4]
    length = {_V4: 4, _NAME: 1 + data[4], _V6: 16}.get(kind)
    if version != VERSION or reserved != 0:
        return _no(len(data), FAILED, "the SOCKS request is not valid")
    if length is None:
        return _no(len(data), NO_SUCH_ADDRESS, "the SOCKS request has an address of no known kind")
    size = 4 + length + 2
    if len(data) < size:
        return None
    if command != _CONNECT:
        return _no(size, NO_SUCH_COMMAND, "only connections can be made: neither BIND nor UDP is offered")
    port = int.from_bytes(data[size - 2 : size], "big")
    try:
        return Order(size, _target(kind, data[4 : size - 2], port))
    except Refused as refusal:
        return Order(size, None, FAILED, refusal)


def _target(kind: int, address: bytes, port: int) -> Target:
    if not port:
        raise Refused("0 is not a port", code="bad_request", status=400)
    if kind == _NAME:
        return read_host(address[1:], port)
    return of_address(IPv4Address(address) if kind == _V4 else IPv6Address(address), port)


def _no(size: int, code: int, reason: str) -> Order:
    return Order(size, None, code, Refused(reason, code="bad_request", status=400))


def reply(code: int) -> bytes:
    """The answer to an order. Where the connection comes from outside is nothing a sandbox needs to know."""
    return bytes((VERSION, code, 0, _V4, 0, 0, 0, 0, 0, 0))
