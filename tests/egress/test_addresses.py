from __future__ import annotations

from ipaddress import ip_address

from carrel.egress.addresses import plain, private


def test_the_wire_asks_what_the_policy_asks() -> None:
    assert private(ip_address("::ffff:169.254.169.254")) == "an address of cloud metadata"
    assert private(ip_address("9.9.9.9")) is None
    assert plain(ip_address("64:ff9b::7f00:1")) == ip_address("127.0.0.1")
