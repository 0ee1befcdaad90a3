"""Which requests get a credential, and that it does not come back. On the wire: test_inspecting.py."""

from __future__ import annotations

import base64
from urllib.parse import quote

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from carrel.egress.access import AccessRefused
from carrel.egress.http.credentials import Credentials
from carrel.egress.http.messages import read_response
from carrel.egress.plan import Injected, placeholder

SECRET = "s3cr3t-V4lue/+=x"
PLACEHOLDER = placeholder("API_KEY")


def injected(
    *,
    methods: tuple[str, ...] | None = None,
    paths: tuple[str, ...] | None = None,
    header: str = "Authorization",
    secret: str = SECRET,
    name: str = "API_KEY",
) -> Injected:
    return Injected("api.test", header, f"Bearer {secret}", secret, name, methods, paths)


def chosen(one: Injected, *, host: str = "api.test", method: str = "GET", target: str = "/") -> bool:
    return Credentials([one]).choose(host, method, target) == (one,)


def test_the_host_must_be_the_very_one() -> None:
    assert chosen(injected())
    for host in ("test", "sub.api.test", "xapi.test", "api.test.evil.test", "127.0.0.1"):
        assert not chosen(injected(), host=host)
        assert not Credentials([injected()]).concern(host)
    assert Credentials([injected()]).concern("api.test")


def test_the_method_must_be_named() -> None:
    assert chosen(injected(methods=("get", "POST")))
    assert chosen(injected(methods=("get", "POST")), method="POST")
    assert not chosen(injected(methods=("get", "POST")), method="DELETE")
    assert not chosen(injected(methods=()))


@pytest.mark.parametrize(
    "path", ["/v1", "/v1/", "/v1/a", "/v1/a/", "/v1?x=//..;", "/v1/a?x#", "/%761/x", "/v1/%20", "/v1/a.b/..c"]
)
def test_a_path_holds_with_all_below_it(path: str) -> None:
    for own in ("/v1", "/v1/"):
        assert chosen(injected(paths=("/other", own)), target=path)
    assert chosen(injected(paths=("/",)), target=path)


@pytest.mark.parametrize("path", ["/", "/v2", "/v10", "/V1", "/v1x/a", "/a/v1", "*", "/v1%20", "/v1:a"])
def test_other_paths_do_not(path: str) -> None:
    assert not chosen(injected(paths=("/v1",)), target=path)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../admin", "/v1/..", "/v1/./a", "/v1/.", "//v1", "/v1//a", "/v1;x=1/a", "/v1;/../a", "/v1\\..\\a",
        "/v1/%2e%2e/a", "/v1/%2E%2e/a", "/v1/.%2e/a", "/v1%2f..%2fa", "/v1%2Fa", "/v1%5ca", "/v1%5Ca", "/v1%3ba", "/v1%3Ba",
        "/v1/%252e%252e/a", "/v1/%00", "/v1/%0d%0a", "/v1/%7f", "/v1/%", "/v1/%2", "/v1/%zz", "/other/../v1",
    ],
)  # fmt: skip
def test_a_path_that_can_be_read_in_two_ways_is_refused(path: str) -> None:
    with pytest.raises(AccessRefused, match="two ways") as raised:
        chosen(injected(paths=("/v1",)), target=path)
    assert raised.value.status == 400
    assert chosen(injected(), target=path)  # nothing depends on it
    assert not chosen(injected(paths=("/v1",), methods=("POST",)), target=path)
    assert not chosen(injected(paths=("/v1",)), host="other.test", target=path)


@given(st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=30))
def test_what_a_path_is_matched_as_is_what_a_server_reads(rest: str) -> None:
    target = "/" + rest
    try:
        found = chosen(injected(paths=("/v1/a",)), target=target)
    except AccessRefused:
        return
    from posixpath import normpath
    from urllib.parse import unquote, urlsplit

    read = normpath(unquote(target.partition("?")[0]))
    assert found == (read == "/v1/a" or read.startswith("/v1/a/"))
    if not target.startswith("//"):
        assert urlsplit(target).path == target.partition("?")[0].partition("#")[0]


def test_the_header_is_ours_alone() -> None:
    credentials = Credentials([injected(header="X-Api-Key")])
    sent = [
        (b"x-api-key", b"mine"),
        (b"X_API_KEY", b"mine"),
        (b"X-Api-Key", PLACEHOLDER.encode()),
        (b"Accept-Encoding", b"gzip"),
        (b"Range", b"bytes=0-3"),
        (b"If-Range", b"x"),
        (b"X-HTTP-Method-Override", b"DELETE"),
        (b"X-Original-URL", b"/admin"),
        (b"X-Forwarded-Host", b"evil.test"),
        (b"Accept", b"*/*"),
    ]
    found = credentials.request_headers(sent, credentials.choose("api.test", "GET", "/"))
    assert found == [
        (b"Accept", b"*/*"),
        (b"Accept-Encoding", b"identity"),
        (b"X-Api-Key", f"Bearer {SECRET}".encode()),
    ]
    without = credentials.request_headers(sent, ())
    assert (b"x-api-key", b"mine") in without
    assert (b"Accept-Encoding", b"gzip") not in without
    assert not [name for name, _ in without if b"range" in name.lower()]


def test_several_are_put_in_each_in_its_header() -> None:
    first, second = injected(paths=("/a",)), injected(header="X-Key", secret="another-one", name="OTHER")
    third = injected(header="AUTHORIZATION", secret="third-secret", name="THIRD")
    credentials = Credentials([first, second, third])
    assert credentials.choose("api.test", "GET", "/b") == (second, third)
    found = credentials.request_headers([], credentials.choose("api.test", "GET", "/a/b"))
    assert found[1:] == [(b"Authorization", f"Bearer {SECRET}".encode()), (b"X-Key", b"Bearer another-one")]


def answer(*headers: bytes, status: bytes = b"200 OK") -> tuple[bytes, list[tuple[bytes, bytes]]]:
    head = b"HTTP/1.1 " + status + b"\r\n" + b"".join(each + b"\r\n" for each in headers) + b"\r\n"
    return Credentials([injected()]).response_headers(read_response(head))


def test_heads_that_come_back_are_cleaned() -> None:
    spelled = [
        SECRET,
        quote(SECRET, safe=""),
        base64.b64encode(f"user:{SECRET}".encode()).decode(),
        SECRET.encode().hex(),
        SECRET.replace("/", "\\/"),
    ]
    for text in spelled:
        reason, headers = answer(f"X-Echo: <{text}>".encode(), b"A: b", status=f"200 {text}".encode())
        assert text.encode() not in reason
        assert PLACEHOLDER.encode() in reason
        assert headers[1] == (b"A", b"b")
        assert text.encode() not in headers[0][1]
    token = "abcDEF1234567890"
    credentials = Credentials([injected(secret=token)])
    for name in (token, token.lower(), f"X-{token.upper()}"):
        head = f"HTTP/1.1 200 OK\r\n{name}: 1\r\nA: b\r\n\r\n".encode()
        assert credentials.response_headers(read_response(head)) == (b"OK", [(b"A", b"b")])


@pytest.mark.parametrize("coding", [b"gzip", b"br", b"identity, gzip", b"x-anything", b"GZIP"])
def test_what_cannot_be_looked_into_is_refused(coding: bytes) -> None:
    with pytest.raises(AccessRefused) as raised:
        answer(b"Content-Encoding: " + coding)
    assert (raised.value.status, raised.value.code) == (502, "bad_response")
    with pytest.raises(AccessRefused):
        answer(b"Content-Range: bytes 0-3/10", status=b"206 Partial Content")
    assert answer(b"Content-Encoding: identity")


@pytest.mark.parametrize("secret", ["abc", "", "line\nbreak-in-it", "tab\tin-it-x", "cr\rin-it-xx", "nul\0in-it"])
def test_a_secret_that_cannot_be_kept_is_not_used(secret: str) -> None:
    credentials = Credentials([injected(secret=secret)])
    with pytest.raises(AccessRefused) as raised:
        credentials.choose("api.test", "GET", "/")
    assert (raised.value.status, raised.value.code) == (502, "credential_unusable")
    assert not secret or secret not in repr(raised.value.as_dict())
    assert credentials.choose("other.test", "GET", "/") == ()


@given(
    first=st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=6, max_size=40),
    second=st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=6, max_size=40),
)
def test_two_secrets_of_one_name_are_both_kept(first: str, second: str) -> None:
    assume(first not in PLACEHOLDER + "-" and second not in PLACEHOLDER + "-")
    credentials = Credentials([injected(secret=first), injected(secret=second, header="X-Other")])
    found = credentials.redactor.data(f"<{first}> <{second}>".encode())
    assert f"<{first}>".encode() not in found
    assert f"<{second}>".encode() not in found


def test_nothing_shows_a_value() -> None:
    credentials = Credentials([injected()])
    assert SECRET not in repr(credentials) + repr(vars(credentials)["_injected"]) + repr(credentials.redactor)
