from __future__ import annotations

import socket
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from carrel.egress.access import AccessRefused, Target
from carrel.egress.outbound.names import of_address, read_authority, read_host, read_port

LONG = ".".join(["a" * 63] * 3 + ["b" * 61])


@pytest.mark.parametrize(
    ("text", "host"),
    [("example.org", "example.org"), ("EXAMPLE.Org", "example.org"), ("example.org.", "example.org"), ("localhost", "localhost"), ("_srv.a_b.example", "_srv.a_b.example"),
     ("r3---sn-x.example", "r3---sn-x.example"), ("xn--bcher-kva.example", "xn--bcher-kva.example"), ("XN--Bcher-KVA.example", "xn--bcher-kva.example"),
     ("1.example", "1.example"), ("0x7f.example", "0x7f.example"), ("127.0.0.1.example", "127.0.0.1.example"), ("3com", "3com"), ("a.0a", "a.0a"), (LONG, LONG), (LONG + ".", LONG)],
)  # fmt: skip
def test_names(text: str, host: str) -> None:
    assert read_host(text, 443) == Target(host, 443)
    assert read_host(text.encode(), 443) == Target(host, 443)


@pytest.mark.parametrize(
    ("text", "address"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "0.0.0.0"), ("255.255.255.255", "255.255.255.255"), ("[::1]", "::1"), ("[0:0:0:0:0:0:0:1]", "::1"), ("[::FFFF:1.2.3.4]", "1.2.3.4"),
     ("[::ffff:7f00:1]", "127.0.0.1"), ("[2001:DB8::A]", "2001:db8::a"), ("[::1.2.3.4]", "::102:304"), ("[::]", "::")],
)  # fmt: skip
def test_addresses(text: str, address: str) -> None:
    assert read_host(text, 80) == Target(address, 80, ip_address(address))


@pytest.mark.parametrize(
    "text",
    ["", ".", "..", "a..b", ".a", "a..", "-a.example", "a-.example", "a.-", "a" * 64, "a." * 127 + "a", LONG + "c", "*", "*.example", "a b", " a", "a ", "\ta", "a\n", "a\r\nb", "a\0b",
     "a\x7f", "a@b", "user:pw@host", "user@host", "a%2eb", "a%00", "%61", "a/b", "a\\b", "a#b", "a?b", "a,b", "a;b", "a=b", "a&b", "a'b", 'a"b', "a<b", "a|b", "a^b", "a`b", "a{b}", "a~b",
     "bücher.example", "例え.テスト", "ａ.example", "a。b", "a．b", "①②⑦.0.0.1", "127。0。0。1", "ſ.example", "\u212a.example", "\u200bexample.org", "xn--", "xn--a", "xn--google-", "xn--99999999", "xn--a\x00",
     "xn--example-.org", "xn--bcher-kva-.example", "xn--xn--bcher-kva-abc.example",
     "1", "0", "127", "127.1", "127.0.1", "2130706433", "017700000001", "0x7f000001", "0x7F.1", "0x7f.0.0.1", "0177.0.0.1", "127.0.0.01", "127.0.0.0x1", "00.0.0.0", "1.2.3.4.5", "256.0.0.1",
     "1.2.3.256", "999.1.1.1", "127.0.0.1.", "127.0.0.1..", "1.2.3", "a.1", "a.example.0", "0x", "a.0x", "a.0xzz", "a.0X1", "foo.09", "0b1.1", "+1.1.1.1", "-1", "1e3.1", "4294967296", "1.2.3.4 ",
     "::1", "::ffff:127.0.0.1", "[::1", "::1]", "[]", "[:]", "[::1]x", "[[::1]]", "[::1%eth0]", "[fe80::1%25eth0]", "[fe80::1%1]", "[::1/64]", "[127.0.0.1]", "[::ffff:127.0.0.01]", "[::ffff:0x7f.0.0.1]",
     "[example.org]", "[::1].", "[v1.x]", "[ ::1]", "[12345::]", "[1:2:3:4:5:6:7:8:9]", "[::1::]", "[::ｆ]"],
)  # fmt: skip
def test_odd_spellings_are_refused(text: str) -> None:
    for given_text in (text, text.encode()):
        with pytest.raises(AccessRefused) as refused:
            read_host(given_text, 443)
        assert (refused.value.status, refused.value.code) == (400, "bad_request")
        assert refused.value.reason.isprintable()
        assert refused.value.reason.isascii()


@pytest.mark.parametrize(
    ("text", "default", "target"),
    [("a.example:443", None, Target("a.example", 443)), ("A.example.:80", 443, Target("a.example", 80)), ("a.example", 80, Target("a.example", 80)),
     ("[::1]:65535", None, Target("::1", 65535, IPv6Address("::1"))), ("[::1]", 80, Target("::1", 80, IPv6Address("::1"))), ("10.0.0.1:1", None, Target("10.0.0.1", 1, IPv4Address("10.0.0.1")))],
)  # fmt: skip
def test_hosts_with_ports(text: str, default: int | None, target: Target) -> None:
    assert read_authority(text, default) == target
    assert read_authority(text.encode(), default) == target
    assert read_authority(str(target), None) == target


@pytest.mark.parametrize("text", ["a.example", "[::1]", "a:", "a:0", "a:00443", "a:+443", "a:-1", "a: 443", "a:443 ", "a:443\r\n", "a:65536", "a:99999", "a:443443", "a:0x1bb", "a:４４３", "a:443:443", ":443",
                                  "::1:443", "[::1]:", "[::1]443", "[::1]:80:80", "u@a:443", "u:p@a:443", "http://a:443", "a:443/", "a/:443", "a:https", "", ":", "[", "]", "[]:1", "1:2:3", "a:1_0"])  # fmt: skip
def test_odd_authorities_are_refused(text: str) -> None:
    for given_text in (text, text.encode()):
        with pytest.raises(AccessRefused) as refused:
            read_authority(given_text, None)
        assert refused.value.status == 400


def test_ports_that_are_none_are_refused() -> None:
    for port in (0, -1, 65_536):
        with pytest.raises(AccessRefused):
            read_host("a.example", port)
    assert read_port("65535") == 65_535


def test_addresses_that_came_as_bytes() -> None:
    assert of_address(IPv6Address("::ffff:10.0.0.1"), 80) == Target("10.0.0.1", 80, IPv4Address("10.0.0.1"))
    assert of_address(IPv6Address("fe80::1%eth0"), 80) == Target("fe80::1", 80, IPv6Address("fe80::1"))


ODD = st.text("0123456789xXabcefnzu.:[]%@-_ /\\#?,\t\r\n\0", max_size=40)
NUMBERS = st.lists(
    st.one_of(st.integers(0, 300).map(str), st.integers(0, 2**33).map(hex), st.integers(0, 2**33).map(lambda n: f"0{n:o}")),
    min_size=1,
    max_size=5,
).map(".".join)  # fmt: skip
LABELS = st.lists(st.text("abz019-_", min_size=1, max_size=8), min_size=1, max_size=5).map(".".join)


@given(st.one_of(ODD, NUMBERS, LABELS, st.text(max_size=40), st.binary(max_size=40), st.ip_addresses().map(str)))
@example(b"\xff\xfe:443")
@example("x" * 1000)
def test_what_passes_means_the_same_to_everybody(text: str | bytes) -> None:
    for read in (lambda: read_host(text, 443), lambda: read_authority(text, None), lambda: read_authority(text, 80)):
        with suppress(AccessRefused):
            _check(read())


def _check(target: Target) -> None:
    assert target.host.isascii()
    assert target.host == target.host.lower()
    again = f"[{target.host}]" if isinstance(target.literal, IPv6Address) else target.host
    assert read_host(again, target.port) == target
    if target.literal is not None:
        numeric = socket.getaddrinfo(
            target.host, target.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        )
        assert ip_address(numeric[0][4][0]) == target.literal
        assert numeric[0][4][1] == target.port
        return
    with pytest.raises(OSError):
        socket.inet_aton(target.host)
    with pytest.raises(socket.gaierror):
        socket.getaddrinfo(target.host, None, flags=socket.AI_NUMERICHOST)


@given(st.ip_addresses(v=4), st.integers(1, 65_535))
def test_every_address_in_its_plain_form_passes(address: IPv4Address, port: int) -> None:
    assert read_authority(f"{address}:{port}", None) == Target(str(address), port, address)
    assert read_authority(f"[::ffff:{address}]:{port}", None) == Target(str(address), port, address)
