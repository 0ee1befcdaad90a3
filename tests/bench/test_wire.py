from __future__ import annotations

import pytest
from bench.measure import BenchFailed
from bench.wire import answer_size, body_of, request
from hypothesis import given
from hypothesis import strategies as st


@given(st.binary(max_size=300))
def test_an_answer_is_whole_exactly_at_its_length(body: bytes) -> None:
    data = b"HTTP/1.1 200 OK\r\ncontent-type: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    assert answer_size(data) == len(data)
    assert body_of(data) == body
    assert answer_size(data[: data.index(b"\r\n\r\n") + 3]) is None


def test_an_answer_without_length_or_success_is_a_failure() -> None:
    with pytest.raises(BenchFailed, match="without length"):
        answer_size(b"HTTP/1.1 200 OK\r\n\r\ncontent-length: 3\r\n")
    with pytest.raises(BenchFailed, match="404"):
        body_of(b"HTTP/1.1 404 Problem\r\ncontent-length: 0\r\n\r\n")


def test_a_request_announces_its_body() -> None:
    made = request("POST", "/x", b"{}", {"authorization": "Bearer t"})
    assert made == b"POST /x HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer t\r\ncontent-length: 2\r\n\r\n{}"
    assert b"content-length: 9\r\n" in request("PUT", "/x", length=9)
