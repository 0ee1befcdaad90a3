from __future__ import annotations

import ssl
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.wayout import tls_for

from carrel.egress.access import AccessRefused
from carrel.egress.listener.first_bytes import (
    MOST_HELLO,
    Hello,
    Malformed,
    NotTls,
    read_hello,
    read_second,
    wants_another,
)


def real_hello(context: ssl.SSLContext, name: str | None) -> bytes:
    """What Python's TLS really writes."""
    context.check_hostname = False
    outgoing = ssl.MemoryBIO()
    connection = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name)
    with suppress(ssl.SSLWantReadError):
        connection.do_handshake()
    return outgoing.read()


def vector(width: int, content: bytes) -> bytes:
    return len(content).to_bytes(width, "big") + content


def extension(kind: int, content: bytes = b"") -> bytes:
    return kind.to_bytes(2, "big") + vector(2, content)


def sni(*names: bytes, kind: int = 0) -> bytes:
    return extension(0, vector(2, b"".join(bytes([kind]) + vector(2, name) for name in names)))


def alpn(*names: bytes) -> bytes:
    return extension(16, vector(2, b"".join(vector(1, name) for name in names)))


def body(extensions: bytes | None = b"", *, version: bytes = b"\3\3", session: bytes = b"", suites: bytes = b"\x13\1",
         compressions: bytes = b"\0", after: bytes = b"") -> bytes:  # fmt: skip
    head = version + bytes(32) + vector(1, session) + vector(2, suites) + vector(1, compressions)
    return head + (b"" if extensions is None else vector(2, extensions)) + after


def message(content: bytes) -> bytes:
    return b"\1" + vector(3, content)


def record(content: bytes, kind: int = 22, version: bytes = b"\3\1") -> bytes:
    return bytes([kind]) + version + vector(2, content)


def hello(*extensions: bytes) -> bytes:
    return record(message(body(b"".join(extensions))))


NAMES = st.sampled_from(
    [None, "a.example", "Example.ORG", "a-b.c_d.example", "xn--bcher-kva.example", ".".join(["a" * 60] * 4)]
)


@given(
    NAMES,
    st.sampled_from([(), ("h2", "http/1.1"), ("http/1.1",), ("x",)]),
    st.sampled_from([(ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3), (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2), (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_3)]),
    st.sampled_from([0, ssl.OP_NO_TICKET, ssl.OP_ENABLE_MIDDLEBOX_COMPAT]),
    st.sampled_from([None, "ECDHE+AESGCM", "ALL:@SECLEVEL=0"]),
)  # fmt: skip
def test_what_python_really_writes(
    name: str | None,
    protocols: tuple[str, ...],
    versions: tuple[ssl.TLSVersion, ssl.TLSVersion],
    options: int,
    ciphers: str | None,
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version, context.maximum_version = versions
    context.options |= options
    if protocols:
        context.set_alpn_protocols(list(protocols))
    if ciphers:
        context.set_ciphers(ciphers)
    data = real_hello(context, name)
    expected = Hello(name.lower() if name else None, False, protocols)
    assert read_hello(data) == expected
    assert read_hello(memoryview(data)) == expected
    assert read_hello(data + b"\x14\3\3\0\1\1 and more") == expected
    for end in range(len(data)):
        assert read_hello(data[:end]) is None


def test_a_session_that_is_taken_up_again_is_read_too() -> None:
    data = hello(sni(b"a.example"), extension(42), extension(41, b"identity"))
    assert read_hello(data) == Hello("a.example", False, (), True)


def test_without_extensions_there_is_no_name() -> None:
    assert read_hello(record(message(body(None)))) == Hello(None, False)
    assert read_hello(hello()) == Hello(None, False)


@pytest.mark.parametrize("kind", [0xFE0D, 0xFD00, 0xFFCE])
def test_an_encrypted_hello_is_known(kind: int) -> None:
    assert read_hello(hello(sni(b"outer.example"), extension(kind, b"x"))) == Hello("outer.example", True)


def test_names_are_in_the_one_spelling() -> None:
    assert read_hello(hello(sni(b"A.Example."))) == Hello("a.example", False)
    assert read_hello(hello(alpn(b"h2", b"\xda\xda"))) == Hello(None, False, ("h2", "\xda\xda"))


@given(st.data())
def test_it_may_come_in_any_number_of_records(data: st.DataObject) -> None:
    whole = message(body(sni(b"a.example") + alpn(b"h2") + extension(21, bytes(data.draw(st.integers(0, 2000))))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=20)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    sent = b"".join(record(piece) for piece in pieces)
    assert read_hello(sent) == Hello("a.example", False, ("h2",))
    assert read_hello(sent[: data.draw(st.integers(0, len(sent) - 1))]) is None


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", b"S", b"\0", b"\x17\3\3\0\1x", b"\x15\3\1\0\2\2(", b"\x16\2", b"\x16HTTP", b"SSH-2.0-x", b"\x80\0\2", b"\xff\xfe\xfd", b"PRI * HTTP/2.0"])  # fmt: skip
def test_what_is_not_tls(data: bytes) -> None:
    with pytest.raises(NotTls):
        read_hello(data)


BROKEN = {
    "of SSL 2": b"\x80\x2e\1\3\1",
    "of SSL 2, long": b"\x80\x9e\1\0\2" + bytes(100),
    "an empty record": record(b"") + hello(),
    "an empty record between": record(message(body())[:9]) + record(b"") + record(message(body())[9:]),
    "a record that is too long": b"\x16\3\1\x40\1",
    "a record of no version": b"\x16\3\5\0\1",
    "a second record of no version": record(message(body())[:9]) + b"\x16\2",
    "another record before its end": record(message(body())[:9]) + record(b"\1", kind=20) + record(message(body())[9:]),
    "another message": record(b"\2" + vector(3, body())),
    "another message behind": record(message(body()) + b"\1"),
    "another message behind, announced": record(message(body()) + b"\1")[:-1],
    "another message behind, second record": record(message(body())[:9]) + record(message(body())[9:] + b"\0"),
    "too long": record(b"\1" + (MOST_HELLO - 3).to_bytes(3, "big")),
    "far too long": record(b"\1\xff\xff\xff"),
    "too long by its records": b"".join(record(bytes([each])) for each in message(body(extension(21, bytes(12_000))))),
    "no version": record(message(body(version=b"\2\0"))),
    "no version again": record(message(body(version=b"\4\0"))),
    "a long session": record(message(body(session=bytes(33)))),
    "no ciphers": record(message(body(suites=b""))),
    "half a cipher": record(message(body(suites=b"\x13\1\x13"))),
    "no compression": record(message(body(compressions=b""))),
    "only compression": record(message(body(compressions=b"\1"))),
    "bytes behind": record(message(body(after=b"\0"))),
    "half an extension": hello(b"\0"),
    "an extension that ends early": hello(b"\0\0\0\5a"),
    "an empty message": record(message(b"")),
    "two names": hello(sni(b"a.example", b"b.example")),
    "the name twice": hello(sni(b"a.example"), sni(b"a.example")),
    "two lists of names": hello(sni(b"a.example"), sni(b"b.example")),
    "no name in the list": hello(extension(0, b"\0\0")),
    "an empty list": hello(extension(0)),
    "an empty name": hello(sni(b"")),
    "another kind of name": hello(sni(b"a.example", kind=1)),
    "bytes behind the name": hello(extension(0, sni(b"a.example")[4:] + b"\0")),
    "an address": hello(sni(b"10.0.0.1")),
    "an address in brackets": hello(sni(b"[::1]")),
    "a bare IPv6 address": hello(sni(b"::1")),
    "an octal address": hello(sni(b"0177.1")),
    "a zero in the name": hello(sni(b"a.example\0.b.example")),
    "a space in the name": hello(sni(b"a.example ")),
    "a name with a port": hello(sni(b"a.example:443")),
    "a name that is not ASCII": hello(sni("bücher.example".encode())),
    "a long name": hello(sni(b"a" * 300)),
    "an extension twice": hello(extension(10, b"x"), extension(10, b"x")),
    "something behind the key": hello(extension(41, b"x"), sni(b"a.example")),
    "no protocols": hello(alpn()),
    "an empty protocol": hello(alpn(b"h2", b"")),
    "bytes behind the protocols": hello(extension(16, b"\0\3\2h2\0")),
}  # fmt: skip


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN.keys())
def test_what_is_broken_is_refused(data: bytes) -> None:
    with pytest.raises(Malformed) as refused:
        read_hello(data)
    assert refused.value.status == 400
    assert refused.value.reason.isprintable()


def test_what_never_ends_is_refused() -> None:
    start = b"\1" + (60_000).to_bytes(3, "big")
    piece = record(start) + record(bytes(16_384)) * 3
    assert read_hello(piece) is None
    with pytest.raises(Malformed):
        read_hello(piece + record(bytes(16_384)) + bytes(MOST_HELLO))


@given(st.binary(max_size=300))
def test_bytes_never_raise_anything_else(data: bytes) -> None:
    for given_data in (
        data,
        b"\x16\3\1" + data,
        record(message(body(data))),
        record(message(data)),
        hello(extension(0, data)),
    ):
        with suppress(AccessRefused):
            read_hello(given_data)


@given(st.data())
def test_neither_does_a_changed_hello(data: st.DataObject) -> None:
    """Every change of one byte leaves what was said, or a refusal, or a wait for more: never a failure."""
    whole = bytearray(hello(sni(b"a.example"), alpn(b"h2"), extension(10, b"\0\2\0\x1d")))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] = data.draw(st.integers(0, 255))
    with suppress(AccessRefused):
        read = read_hello(bytes(whole))
        assert read is None or isinstance(read, Hello)


# when the server asks for another


def asked_twice(curve: str) -> tuple[bytes, bytes, bytes]:
    """The client's first bytes, the server's answer, and what the client says to that; the server wants a curve."""
    server, _ = tls_for("a.example")
    server.set_ecdh_curve(curve)
    client = ssl.create_default_context()
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server, server_hostname="a.example")
    answering = server.wrap_bio(to_server, to_client, server_side=True)
    said = []
    for end, outgoing in ((asking, to_server), (answering, to_client), (asking, to_server)):
        with suppress(ssl.SSLError):
            end.do_handshake()
        said.append(outgoing.read())
        outgoing.write(said[-1])
    return said[0], said[1], said[2]


def test_a_server_that_asks_for_another_hello_is_known() -> None:
    first, answer, second = asked_twice("secp384r1")
    found = read_hello(first + b"\x17more")
    assert found is not None
    assert found.size == len(first)
    record_size = 5 + int.from_bytes(answer[3:5], "big")
    assert wants_another(answer[:64]) == record_size
    assert all(wants_another(answer[:size]) is None for size in range(1, 43))
    again = read_second(second)
    assert again == found
    assert all(read_second(second[:size]) is None for size in range(len(second)))
    early = b"\x17\3\3\0\3abc"
    assert read_second(early * 3 + second) == found
    assert read_second(b"") is None


@pytest.mark.parametrize(
    "data", [b"\x15\3\3\0\2\2(", b"HTTP/1.1 400 ", b"\x16\3\3\0\4\0\0\0\0", b"\x16\3\3\0\x7a\2\0\0\x76\3\3" + bytes(40)]
)
def test_other_answers_ask_for_nothing(data: bytes) -> None:
    assert wants_another(data) == 0


def test_what_could_hide_the_question_is_refused() -> None:
    with pytest.raises(Malformed):
        wants_another(b"\x16\3\3\0\5\2\0\0\x76\3")
    with pytest.raises(NotTls):
        read_second(b"\x14\3\3\0\1\1GET / HTTP/1.1\r\n")
    with pytest.raises(Malformed):
        read_second(b"\x14\3\3\0\1\1" + hello(sni(b"a.example"), sni(b"b.example")))


@given(st.binary(max_size=300))
def test_neither_reader_raises_anything_else(data: bytes) -> None:
    with suppress(AccessRefused):
        read_second(data)
    with suppress(AccessRefused):
        wants_another(b"\x16" + data)
