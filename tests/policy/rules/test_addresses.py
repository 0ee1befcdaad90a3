from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.policy.rules.addresses import destination, embedded, forms, read, unmapped, why_not_public

KINDS = {
    "metadata": "169.254.169.254 169.254.170.2 169.254.170.23 100.100.100.200 168.63.129.16 192.0.0.192 fd00:ec2::254 fd00:ec2::23 fd20:ce::254 ::ffff:169.254.169.254 64:ff9b::a9fe:a9fe 2002:a9fe:a9fe::",
    "unspecified": "0.0.0.0 :: ::ffff:0.0.0.0 64:ff9b::",
    "this network": "0.0.0.1 0.255.255.255 ::ffff:0.1.2.3 ::2",
    "loopback": "127.0.0.1 127.255.255.254 ::1 ::ffff:127.0.0.1 ::ffff:0:127.0.0.1 64:ff9b::127.0.0.1 64:ff9b:1::127.0.0.1 2002:7f00:1::1 ::127.0.0.1 fe80::5efe:7f00:1 2606:4700::5efe:127.0.0.1 2606:4700::200:5efe:127.0.0.1",
    "a private": "10.0.0.0 10.255.255.255 172.16.0.1 172.31.255.255 192.168.0.1 ::ffff:10.0.0.1 2002:c0a8:101:: 64:ff9b:1:a00:0:100::",
    "carrier": "100.64.0.0 100.127.255.255",
    "link-local": "169.254.0.1 fe80::1 febf::1 fe80::1%eth0",
    "protocol": "192.0.0.1 192.0.0.9 192.0.0.10 192.0.0.170 2001:1::1 2001:3::1 2001:4:112::1 2001:30::1",
    "documentation": "192.0.2.1 198.51.100.1 203.0.113.1 2001:db8::1 3fff::1 3fff:fff::1",
    "6to4 relays": "192.88.99.1",
    "benchmarks": "198.18.0.1 198.19.255.255 2001:2::1",
    "multicast": "224.0.0.1 239.255.255.255 233.252.0.1 ff02::1 ff0e::1",
    "broadcast": "255.255.255.255 ::ffff:255.255.255.255",
    "a reserved": "240.0.0.1 255.255.255.254 1::1 4000::1 e000::1 200::1 64:ff9b:2::1 ::ffff:1:0:0",
    "compatible": "::8.8.8.8",
    "a translated": "::ffff:0:8.8.8.8",
    "local translation": "64:ff9b:1::8.8.8.8 64:ff9b:1:808:8:800::",
    "discarded": "100::1",
    "dummy": "100:0:0:1::1",
    "Teredo": "2001:0:808:808::f7f7:f7f7",
    "ORCHID": "2001:10::1 2001:20::1 2001:2f::1",
    "6to4 address": "2002:808:808::1",
    "6bone": "3ffe::1",
    "segment": "5f00::1",
    "unique local": "fc00::1 fd12:3456::1",
    "site-local": "fec0::1",
}  # fmt: skip


@pytest.mark.parametrize(("words", "text"), [(words, text) for words, texts in KINDS.items() for text in texts.split()])
def test_what_is_not_public(words: str, text: str) -> None:
    found = why_not_public(ip_address(text))
    assert found is not None
    assert words in found


@pytest.mark.parametrize("text", ["1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.1", "100.63.255.255", "100.128.0.0", "126.255.255.255", "128.0.0.1", "169.253.255.255", "172.15.255.255", "172.32.0.1", "192.0.1.1", "192.0.3.1", "192.167.1.1", "192.169.1.1", "192.88.98.1", "198.17.1.1", "198.20.0.1", "223.255.255.255", "168.63.129.17", "2606:4700:4700::1111", "2a00:1450::1", "2001:4860:4860::8888", "2001:200::1", "2003::1", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "2620:fe::fe", "3000::1", "3ffd::1"])  # fmt: skip
def test_what_is_public(text: str) -> None:
    assert why_not_public(ip_address(text)) is None


def test_both_addresses_of_a_teredo_address_count() -> None:
    by_server = ip_address("2001:0:7f00:1::f7f7:f7f7")
    by_client = ip_address("2001:0:808:808::80ff:fffe")
    assert embedded(by_server) == (IPv4Address("8.8.8.8"), IPv4Address("127.0.0.1"))
    assert embedded(by_client) == (IPv4Address("127.0.0.1"), IPv4Address("8.8.8.8"))
    assert why_not_public(by_server) == why_not_public(by_client) == "a loopback address"


@pytest.mark.parametrize(
    ("text", "meant"),
    [("::ffff:1.2.3.4", "1.2.3.4"), ("::ffff:0:1.2.3.4", "1.2.3.4"), ("64:ff9b::1.2.3.4", "1.2.3.4"), ("64:ff9b:1::1.2.3.4", "1.2.3.4"), ("2002:102:304::9", "1.2.3.4"),
     ("2001:0:808:808::fefd:fcfb", "1.2.3.4"), ("::1.2.3.4", "1.2.3.4"), ("::1", "::1"), ("::", "::"), ("2606:4700::1", "2606:4700::1"), ("1.2.3.4", "1.2.3.4")],
)  # fmt: skip
def test_the_address_really_meant(text: str, meant: str) -> None:
    assert destination(ip_address(text)) == ip_address(meant)


def test_only_a_mapped_address_is_the_same() -> None:
    assert unmapped(IPv6Address("::ffff:1.2.3.4")) == IPv4Address("1.2.3.4")
    assert unmapped(IPv6Address("64:ff9b::1.2.3.4")) == IPv6Address("64:ff9b::1.2.3.4")
    assert unmapped(IPv4Address("1.2.3.4")) == IPv4Address("1.2.3.4")


def test_reading() -> None:
    assert read("[::1]") == IPv6Address("::1")
    assert read("1.2.3.4") == IPv4Address("1.2.3.4")
    for text in ("a.example", "1.2.3", "", "[]", "0x7f.0.0.1"):
        assert read(text) is None


WRAPPED = ["::ffff:{}", "::ffff:0:{}", "64:ff9b::{}", "64:ff9b:1::{}", "::{}"]


@given(st.ip_addresses(v=4), st.sampled_from(WRAPPED))
def test_what_is_private_stays_so_in_every_form(address: IPv4Address, form: str) -> None:
    wrapped = ip_address(form.format(address))
    if address == wrapped or int(wrapped) < 2:
        return
    assert address in forms(wrapped)
    if why_not_public(address) is not None:
        assert why_not_public(wrapped) is not None


@given(st.ip_addresses())
def test_what_python_does_not_call_global_is_never_public(address: IPv4Address | IPv6Address) -> None:
    if why_not_public(address) is None:
        assert destination(address).is_global
        assert not destination(address).is_multicast
        assert not destination(address).is_reserved
