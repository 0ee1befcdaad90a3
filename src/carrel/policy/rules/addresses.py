"""IP addresses: which ones are not on the public internet, and which IPv4 address an IPv6 address contains.

The table is written out because `is_global` of Python changes between versions. `is_global` is checked as well.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address
_Network = IPv4Network | IPv6Network

_METADATA = "an address of cloud metadata"
_DOCUMENTATION = "an address for documentation"
_INTERNAL = frozenset({"a private address", "a carrier's address", "a unique local address", _DOCUMENTATION})
_KINDS: dict[str, str] = {
    "169.254.169.254/32": _METADATA,
    "169.254.170.2/32": _METADATA,
    "169.254.170.23/32": _METADATA,
    "100.100.100.200/32": _METADATA,
    "168.63.129.16/32": _METADATA,
    "192.0.0.192/32": _METADATA,
    "fd00:ec2::/32": _METADATA,
    "fd20:ce::254/128": _METADATA,
    "0.0.0.0/32": "the unspecified address",
    "0.0.0.0/8": "an address of this network",
    "127.0.0.0/8": "a loopback address",
    "10.0.0.0/8": "a private address",
    "172.16.0.0/12": "a private address",
    "192.168.0.0/16": "a private address",
    "100.64.0.0/10": "a carrier's address",
    "169.254.0.0/16": "a link-local address",
    "192.0.0.0/24": "an address of a protocol",
    "192.0.2.0/24": _DOCUMENTATION,
    "198.51.100.0/24": _DOCUMENTATION,
    "203.0.113.0/24": _DOCUMENTATION,
    "192.88.99.0/24": "an address of 6to4 relays",
    "198.18.0.0/15": "an address for benchmarks",
    "224.0.0.0/4": "a multicast address",
    "255.255.255.255/32": "the broadcast address",
    "240.0.0.0/4": "a reserved address",
    "::/128": "the unspecified address",
    "::1/128": "a loopback address",
    "::/96": "an IPv4-compatible address",
    "::ffff:0:0:0/96": "a translated address",
    "64:ff9b:1::/48": "an address of local translation",
    "100::/64": "a discarded address",
    "100:0:0:1::/64": "a dummy address",
    "2001::/32": "a Teredo address",
    "2001:2::/48": "an address for benchmarks",
    "2001:10::/28": "an ORCHID",
    "2001:20::/28": "an ORCHID",
    "2001::/23": "an address of a protocol",
    "2002::/16": "a 6to4 address",
    "2001:db8::/32": _DOCUMENTATION,
    "3fff::/20": _DOCUMENTATION,
    "3ffe::/16": "an address of the 6bone",
    "5f00::/16": "a segment identifier",
    "fc00::/7": "a unique local address",
    "fe80::/10": "a link-local address",
    "fec0::/10": "a site-local address",
    "ff00::/8": "a multicast address",
}


def _table(version: int) -> tuple[tuple[_Network, str], ...]:
    read = [(ip_network(text), words) for text, words in _KINDS.items()]
    # The narrowest network comes first: "cloud metadata" says more than "link-local".
    return tuple(sorted((each for each in read if each[0].version == version), key=lambda each: -each[0].prefixlen))


_TABLES = {4: _table(4), 6: _table(6)}
_UNICAST = IPv6Network("2000::/3")
_TRANSLATED = IPv6Network("64:ff9b::/96")
_LAST_32 = tuple(IPv6Network(text) for text in ("::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96", "::/96"))
_LOCAL_TRANSLATION = IPv6Network("64:ff9b:1::/48")
_ISATAP = frozenset({0x00005EFE, 0x02005EFE})
_LOW = 0xFFFF_FFFF


def read(text: str) -> Address | None:
    """Parse an address, with or without brackets; None if the text is not an address."""
    try:
        return ip_address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


def unmapped(address: Address) -> Address:
    """Convert an IPv4-mapped IPv6 address to the IPv4 address, which is what a machine connects to."""
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


def embedded(address: Address) -> tuple[IPv4Address, ...]:
    """Return every IPv4 address inside an IPv6 address; the destination comes first."""
    if isinstance(address, IPv4Address):
        return ()
    number = int(address)
    if number >> 1 == 0:
        return ()
    if any(address in each for each in _LAST_32):
        return (IPv4Address(number & _LOW),)
    if address in _LOCAL_TRANSLATION:
        # The bits of the IPv4 address depend on the length of the prefix that the network chose.
        split = ((number >> 64) & 0xFFFF) << 16 | (number >> 40) & 0xFFFF
        return tuple(IPv4Address(each) for each in (number & _LOW, split) if each)
    if address.sixtofour is not None:
        return (address.sixtofour,)
    if address.teredo is not None:
        server, client = address.teredo
        return client, server
    if (number >> 32) & _LOW in _ISATAP:
        return (IPv4Address(number & _LOW),)
    return ()


def destination(address: Address) -> Address:
    """Return the IPv4 address inside a mapped, translated or tunnel address; other addresses are returned unchanged."""
    return next(iter(embedded(address)), address)


def forms(address: Address) -> tuple[Address, ...]:
    """Return the address and every address inside it. A rule that denies one of them denies the address."""
    return (address, *embedded(address))


def why_not_public(address: Address) -> str | None:
    """Describe an address that is not public unicast; None if it is."""
    inner = embedded(address)
    for each in inner:
        if words := _kind(each):
            return words
    mapped = inner and address in _LAST_32[0]
    return None if mapped or (inner and address in _TRANSLATED) else _kind(address)


def is_internal(address: Address) -> bool:
    """Whether an address belongs to an organisation's own network. Addresses of this machine, of its link and of cloud
    metadata services do not count.
    """
    return why_not_public(address) in _INTERNAL


def _kind(address: Address) -> str | None:
    for network, words in _TABLES[address.version]:
        if address in network:
            return words
    if isinstance(address, IPv6Address) and address not in _UNICAST:
        return "a reserved address"
    return None if address.is_global else "not a public address"
