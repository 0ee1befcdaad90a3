from __future__ import annotations

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.egress.access import AccessRefused
from carrel.egress.http.messages import (
    METHODS,
    MOST,
    Chunks,
    chunk,
    end_of,
    read_request,
    read_response,
    write_request,
    write_response,
)

GOOD = b"GET http://a.test/x HTTP/1.1\r\nHost: a.test\r\n\r\n"

BAD_REQUESTS = {
    "a bare line feed": b"GET / HTTP/1.1\nHost: a\n\r\n\r\n",
    "a bare line feed between headers": b"GET / HTTP/1.1\r\nHost: a\nX: b\r\n\r\n",
    "a bare carriage return": b"GET / HTTP/1.1\r\nHost: a\rX: b\r\n\r\n",
    "a folded line": b"GET / HTTP/1.1\r\nHost: a\r\nX: a\r\n b\r\n\r\n",
    "a folded line at the start": b"GET / HTTP/1.1\r\n X: a\r\nHost: a\r\n\r\n",
    "a length beside chunks": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
    "chunks beside a length": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n",
    "one length twice": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\n",
    "a list of lengths": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3, 3\r\n\r\n",
    "a signed length": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +3\r\n\r\n",
    "a negative length": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -3\r\n\r\n",
    "a hexadecimal length": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0x3\r\n\r\n",
    "a length without end": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    "an empty length": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length:\r\n\r\n",
    "a space before the colon": b"GET / HTTP/1.1\r\nHost : a\r\n\r\n",
    "a space in a name": b"GET / HTTP/1.1\r\nHost: a\r\nX Y: b\r\n\r\n",
    "a zero byte": b"GET / HTTP/1.1\r\nHost: a\r\nX: a\0b\r\n\r\n",
    "a control byte": b"GET / HTTP/1.1\r\nHost: a\r\nX: a\x01b\r\n\r\n",
    "a header without a name": b"GET / HTTP/1.1\r\nHost: a\r\n: b\r\n\r\n",
    "a header without a colon": b"GET / HTTP/1.1\r\nHost: a\r\nX\r\n\r\n",
    "another coding": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n",
    "chunked and then another": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, identity\r\n\r\n",
    "another and then chunked": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
    "chunked twice": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
    "something like chunked": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n",
    "chunked with a vertical tab": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: \x0bchunked\r\n\r\n",
    "chunks in HTTP/1.0": b"POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n",
    "HTTP/0.9": b"GET /\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\n",
    "HTTP/1.2": b"GET / HTTP/1.2\r\nHost: a\r\n\r\n",
    "an empty line first": b"\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "a tab after the method": b"GET\t/ HTTP/1.1\r\nHost: a\r\n\r\n",
    "two spaces": b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n",
    "a space at the end of the line": b"GET / HTTP/1.1 \r\nHost: a\r\n\r\n",
    "a space in the target": b"GET /a b HTTP/1.1\r\nHost: a\r\n\r\n",
    "a target that is not ASCII": b"GET /\xc3\xa9 HTTP/1.1\r\nHost: a\r\n\r\n",
    "a method in lower case": b"get / HTTP/1.1\r\nHost: a\r\n\r\n",
    "an unknown method": b"BREW / HTTP/1.1\r\nHost: a\r\n\r\n",
    "TRACE": b"TRACE / HTTP/1.1\r\nHost: a\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n",
    "two hosts in HTTP/1.0": b"GET / HTTP/1.0\r\nHost: a\r\nhost: b\r\n\r\n",
    "another expectation": b"GET / HTTP/1.1\r\nHost: a\r\nExpect: the worst\r\n\r\n",
    "a CONNECT with a body": b"CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\nContent-Length: 5\r\n\r\n",
    "too many headers": b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 300 + b"\r\n",
}

BAD_RESPONSES = {
    "no version": b"200 OK\r\n\r\n",
    "HTTP/2": b"HTTP/2 200 OK\r\n\r\n",
    "a bare line feed": b"HTTP/1.1 200 OK\nX: y\r\n\r\n",
    "a folded line": b"HTTP/1.1 200 OK\r\nX: y\r\n z\r\n\r\n",
    "a length beside chunks": b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n",
    "another coding": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
    "a status of two digits": b"HTTP/1.1 20 OK\r\n\r\n",
    "a status beyond": b"HTTP/1.1 600 OK\r\n\r\n",
    "a control byte in the reason": b"HTTP/1.1 200 O\x00K\r\n\r\n",
}


@pytest.mark.parametrize("head", BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_what_could_be_read_in_two_ways_is_refused(head: bytes) -> None:
    with pytest.raises(AccessRefused) as refused:
        read_request(head)
    assert refused.value.status in (400, 417, 431, 501)


@pytest.mark.parametrize("head", BAD_RESPONSES.values(), ids=BAD_RESPONSES)
def test_a_server_is_read_with_the_same_care(head: bytes) -> None:
    with pytest.raises(AccessRefused) as refused:
        read_response(head)
    assert refused.value.status == 502


def test_a_request_is_read() -> None:
    head = b"POST http://a.test/x?y HTTP/1.1\r\nHost: a.test\r\nX-A: 1\r\nx-a:  2 \r\nContent-Length: 12\r\n\r\n"
    found = read_request(head)
    assert (found.method, found.target, found.minor) == ("POST", "http://a.test/x?y", 1)
    assert (found.length, found.chunked, found.body, found.lasting, found.websocket) == (12, False, True, True, False)
    assert list(found.all(b"x-a")) == [b"1", b"2"]
    assert found.forwarded() == [(b"X-A", b"1"), (b"x-a", b"2")]
    assert not read_request(b"GET / HTTP/1.0\r\n\r\n").lasting
    assert not read_request(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: keep-alive, CLOSE\r\n\r\n").lasting


def test_headers_about_the_connection_stay_with_it() -> None:
    head = (
        b"GET http://a/ HTTP/1.1\r\nHost: a\r\nConnection: x-one, Upgrade\r\nX-One: 1\r\nX-Two: 2\r\nTE: trailers\r\n"
        b"Upgrade: h2c\r\nKeep-Alive: 5\r\nProxy-Connection: keep-alive\r\nProxy-Authorization: Basic x\r\n"
        b"Trailer: y\r\nExpect: 100-continue\r\n\r\n"
    )
    found = read_request(head)
    assert found.forwarded() == [(b"X-Two", b"2")]
    assert not found.websocket
    upgrade = b"GET http://a/ HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: WebSocket\r\n\r\n"
    assert read_request(upgrade).websocket


def test_a_response_is_read() -> None:
    found = read_response(b"HTTP/1.1 404 Not Found\r\nTransfer-Encoding: Chunked\r\n\r\n")
    assert (found.status, found.reason, found.chunked, found.length) == (404, b"Not Found", True, None)
    assert found.bodiless("HEAD")
    assert not found.bodiless("GET")
    assert read_response(b"HTTP/1.1 304\r\n\r\n").bodiless("GET")


def test_where_a_head_ends() -> None:
    assert end_of(GOOD + b"rest") == len(GOOD)
    assert end_of(GOOD[:-1]) is None
    with pytest.raises(AccessRefused):
        end_of(b"x" * MOST)


NAME = st.from_regex(rb"X-[A-Za-z0-9-]{1,10}", fullmatch=True)
VALUE = st.from_regex(rb"([!-~]([ -~]{0,20}[!-~])?)?", fullmatch=True)


@given(
    st.sampled_from(sorted(METHODS - {"CONNECT"})),
    st.from_regex(r"/[!-~]{0,30}", fullmatch=True),
    st.lists(st.tuples(NAME, VALUE), max_size=8),
    st.one_of(st.none(), st.integers(0, 10**9), st.just("chunked")),
)
def test_what_is_written_is_read_by_others_as_we_read_it(
    method: str, target: str, headers: list[tuple[bytes, bytes]], body: int | str | None
) -> None:
    framing = {None: [], "chunked": [(b"Transfer-Encoding", b"chunked")]}.get(body, [(b"Content-Length", b"%a" % body)])
    head = b"".join([f"{method} {target} HTTP/1.1\r\nHost: a.test\r\n".encode()])
    head += b"".join(b"%s: %s\r\n" % each for each in headers + framing) + b"\r\n"
    try:
        found = read_request(head)
    except AccessRefused:
        return  # the parser takes no fragments in a path, for one
    written = write_request(found.method, found.target, "a.test", found.forwarded(), found)
    other = h11.Connection(h11.SERVER)
    other.receive_data(written)
    event = other.next_event()
    assert isinstance(event, h11.Request)
    assert (event.method, event.target) == (method.encode(), target.encode())
    seen = [(name, value) for name, value in event.headers if name.startswith(b"x-")]
    assert seen == [(name.lower(), value) for name, value in headers]
    again = read_request(written)
    assert (again.length, again.chunked) == (found.length, found.chunked)


@given(st.binary(max_size=300) | st.binary(max_size=60).map(lambda junk: GOOD[:30] + junk + GOOD[30:]))
def test_nothing_makes_the_readers_fail(junk: bytes) -> None:
    for read in (read_request, read_response):
        for data in (junk, junk + b"\r\n\r\n"):
            try:
                found = read(data)
            except AccessRefused:
                continue
            assert b"\n" not in b"".join(part for header in found.headers for part in header)


# chunks


def unchunk(data: bytes, sizes: list[int]) -> tuple[bytes, bytes]:
    """The body, and the bytes behind it, when the data comes in pieces of these sizes."""
    chunks, body, shown, at = Chunks(), b"", 0, 0
    sizes = [*sizes, len(data)]
    while not chunks.ended:
        shown = min(len(data), shown + (sizes.pop(0) if sizes else len(data)))
        used, piece = chunks.feed(data[at:shown])
        at += used
        body += piece
        if not used and shown == len(data) and not sizes:
            raise EOFError
    return body, data[at:]


@given(
    st.lists(st.binary(min_size=1, max_size=50), max_size=6),
    st.lists(st.integers(1, 30), max_size=30),
    st.booleans(),
    st.binary(max_size=20),
)
def test_bodies_come_out_of_their_chunks_however_they_arrive(
    pieces: list[bytes], sizes: list[int], extended: bool, behind: bytes
) -> None:
    extension = b";a=b" if extended else b""
    data = b"".join(b"%x%s\r\n%s\r\n" % (len(each), extension, each) for each in pieces)
    data += b"0" + extension + b"\r\n" + (b"X-Trailer: y\r\n" if extended else b"") + b"\r\n"
    assert unchunk(data + behind, sizes) == (b"".join(pieces), behind)
    written = b"".join(map(chunk, pieces)) + chunk(b"")
    assert unchunk(written, sizes) == (b"".join(pieces), b"")


@pytest.mark.parametrize(
    "data",
    [
        b"5\nhello\r\n0\r\n\r\n",
        b"5\r\nhello0\r\n\r\n",
        b"5\r\nhello\n0\r\n\r\n",
        b"5\r\nhelloXX0\r\n\r\n",
        b"+5\r\nhello\r\n0\r\n\r\n",
        b"-5\r\nhello\r\n0\r\n\r\n",
        b"0x5\r\nhello\r\n0\r\n\r\n",
        b" 5\r\nhello\r\n0\r\n\r\n",
        b"5 \r\nhello\r\n0\r\n\r\n",
        b"\r\n\r\n",
        b"g\r\n",
        b"ffffffffffffffffff\r\n",
        b"5;" + b"x" * 2000 + b"\r\nhello\r\n0\r\n\r\n",
        b"5;a\x00b\r\nhello\r\n0\r\n\r\n",
        b"0\r\nnot a trailer\r\n\r\n",
        b"0\r\nX: y\r\n folded\r\n\r\n",
        b"0\r\nX: y\n\r\n",
    ],
)
def test_chunks_that_are_not_as_they_must_be_are_refused(data: bytes) -> None:
    with pytest.raises(AccessRefused):
        unchunk(data, [])


def test_what_goes_beside_a_body_is_bounded() -> None:
    chunks = Chunks()
    with pytest.raises(AccessRefused, match="beside"):
        for _ in range(1000):
            chunks.feed(b"1;" + b"x" * 900 + b"\r\na\r\n")


def test_the_head_of_a_response_is_written() -> None:
    assert write_response(200, b"OK", [(b"A", b"b")]) == b"HTTP/1.1 200 OK\r\nA: b\r\n\r\n"
