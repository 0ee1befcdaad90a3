"""Parses the hosts and ports that a sandbox writes: one spelling is accepted, all others are refused.

An accepted host means the same to every program: a name in lower-case ASCII, or an address in its usual form. Knows no
policy and looks nothing up.
"""

from __future__ import annotations

import re
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address

import idna

from carrel.egress.access import Address, BadRequest, Target

MAX_NAME = 253
MAX_LABEL = 63
MAX_PORT = 65_535

_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?")
_PLAIN = re.compile(r"(0|[1-9][0-9]{0,2})(\.(0|[1-9][0-9]{0,2})){3}")
_NUMBER = re.compile(r"[0-9]+|0x.*")
_PORT = re.compile(r"[1-9][0-9]{0,4}")


def read_host(text: str | bytes, port: int) -> Target:
    """Parse a host: a name, four decimal numbers, or an IPv6 address in brackets. Raises `Refused`."""
    if not 1 <= port <= MAX_PORT:
        raise BadRequest(f"{port} is not a port")
    host = _ascii(text)
    if host.startswith("["):
        return of_address(_in_brackets(host), port)
    if _PLAIN.fullmatch(host):
        return of_address(_four_numbers(host), port)
    return Target(_name(host), port)


@lru_cache(1024)
def read_authority(text: str | bytes, default_port: int | None) -> Target:
    """Parse a host with an optional port, as in `CONNECT` and `Host`. The port is required when there is no default.
    Cached, because programs repeat them.
    """
    whole = _ascii(text)
    host, colon, port = whole.rpartition(":")
    if not colon or whole.endswith("]"):
        if default_port is None:
            raise BadRequest(f"'{_shown(whole)}' names no port")
        return read_host(whole, default_port)
    if ":" in host and not host.startswith("["):
        raise BadRequest(f"'{_shown(whole)}' is not a host and a port; an IPv6 address is written in brackets")
    return read_host(host, read_port(port))


def read_port(text: str) -> int:
    """Parse a port: decimal digits only."""
    if not _PORT.fullmatch(text) or int(text) > MAX_PORT:
        raise BadRequest(f"'{_shown(text)}' is not a port")
    return int(text)


def of_address(address: Address, port: int) -> Target:
    """Return the target of an address. An IPv4 address mapped into IPv6 is unwrapped."""
    if isinstance(address, IPv6Address):
        address = address.ipv4_mapped or IPv6Address(int(address))
    return Target(str(address), port, address)


def _ascii(text: str | bytes) -> str:
    # The longest valid text is a name with a trailing dot and a port.
    if len(text) > MAX_NAME + 7:
        raise BadRequest("the host is longer than a name can be")
    try:
        return text.decode("ascii") if isinstance(text, bytes) else text.encode("ascii").decode("ascii")
    except UnicodeError:
        raise BadRequest("the host is not plain ASCII", hint="write international names in their xn-- form") from None


def _in_brackets(host: str) -> IPv6Address:
    inner = host[1:-1]
    # A scope (`%eth0`) would choose a network interface of this host.
    if not host.endswith("]") or "%" in inner or "/" in inner:
        raise BadRequest(f"'{_shown(host)}' is not an IPv6 address")
    try:
        return IPv6Address(inner)
    except ValueError:
        raise BadRequest(f"'{_shown(host)}' is not an IPv6 address") from None


def _four_numbers(host: str) -> IPv4Address:
    try:
        return IPv4Address(host)
    except ValueError:
        raise BadRequest(f"'{_shown(host)}' is not an address") from None


def _name(host: str) -> str:
    name = host.removesuffix(".").lower()
    labels = name.split(".")
    if not name or len(name) > MAX_NAME or any(len(each) > MAX_LABEL or not _LABEL.fullmatch(each) for each in labels):
        raise BadRequest(f"'{_shown(host)}' is not the name of a host")
    # Some programs read such names as addresses: octal, hexadecimal, or with missing parts.
    if _NUMBER.fullmatch(labels[-1]):
        raise BadRequest(f"'{_shown(host)}' is not the name of a host", hint="write an address as four decimal numbers")
    for label in labels:
        if label.startswith("xn--") and not _is_international(label):
            raise BadRequest(f"'{_shown(label)}' is not the xn-- form of a name")
    return name


def _is_international(label: str) -> bool:
    try:
        return idna.alabel(idna.ulabel(label)) == label.encode()
    except (idna.IDNAError, UnicodeError):
        return False


def _shown(text: str) -> str:
    return text[:100].encode("unicode_escape").decode("ascii")
