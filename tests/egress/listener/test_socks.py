from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.egress.listener.first_bytes import read_socks_greeting, read_socks_request, socks_reply


def test_a_greeting_is_read_as_soon_as_it_is_whole() -> None:
    assert read_socks_greeting(b"\x05") is None
    assert read_socks_greeting(b"\x05\x02\x00") is None
    assert read_socks_greeting(b"\x05\x02\x02\x00rest") == (4, True)
    assert read_socks_greeting(b"\x05\x01\x02") == (3, False)
    assert read_socks_greeting(b"\x05\x00") == (2, False)


@pytest.mark.parametrize(
    ("order", "target"),
    [
        (b"\x05\x01\x00\x03\x06a.test\x01\xbb", "a.test:443"),
        (b"\x05\x01\x00\x03\x06A.TEST\x01\xbb", "a.test:443"),
        (b"\x05\x01\x00\x01\x7f\x00\x00\x02\x00\x50", "127.0.0.2:80"),
        (b"\x05\x01\x00\x03\x09127.0.0.2\x00\x50", "127.0.0.2:80"),
        (b"\x05\x01\x00\x04" + b"\x20\x01" + bytes(13) + b"\x01\x00\x50", "[2001::1]:80"),
        (b"\x05\x01\x00\x04" + bytes(10) + b"\xff\xff\x7f\x00\x00\x02\x00\x50", "127.0.0.2:80"),
    ],
)
def test_an_order_names_a_target(order: bytes, target: str) -> None:
    for size in range(len(order)):
        assert read_socks_request(order[:size]) is None
    found = read_socks_request(order + b"rest")
    assert found is not None
    assert (found.size, str(found.target)) == (len(order), target)


@pytest.mark.parametrize(
    ("order", "code"),
    [
        (b"\x05\x02\x00\x01\x7f\x00\x00\x02\x00\x50", 7),  # BIND
        (b"\x05\x03\x00\x01\x7f\x00\x00\x02\x00\x50", 7),  # UDP ASSOCIATE
        (b"\x05\x01\x00\x02\x7f\x00\x00\x02\x00\x50", 8),
        (b"\x04\x01\x00\x01\x7f\x00\x00\x02\x00\x50", 1),
        (b"\x05\x01\x01\x01\x7f\x00\x00\x02\x00\x50", 1),
        (b"\x05\x01\x00\x01\x7f\x00\x00\x02\x00\x00", 1),
        (b"\x05\x01\x00\x03\x00\x00\x50", 1),
        (b"\x05\x01\x00\x03\x0a0x7f000001\x00\x50", 1),
        (b"\x05\x01\x00\x03\x04a\x00.b\x00\x50", 1),
    ],
)
def test_everything_else_is_refused_with_its_number(order: bytes, code: int) -> None:
    found = read_socks_request(order)
    assert found is not None
    assert found.target is None
    assert found.refusal is not None
    assert found.code == code
    assert socks_reply(code)[:2] == bytes((5, code))


@given(st.binary(max_size=300))
def test_no_bytes_make_the_readers_fail(data: bytes) -> None:
    greeting, order = read_socks_greeting(data), read_socks_request(data)
    assert greeting is None or greeting[0] <= len(data)
    assert order is None or (order.size <= len(data) and (order.target is None) == (order.refusal is not None))
