"""What passes between a visitor and a server in a sandbox: both may be hostile to the other and to carrel."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.control.ports.headers import Headers, access_cookie, inward, outward, without_cookie


def inside(*given: tuple[bytes, bytes]) -> Headers:
    return inward(given, host=b"localhost:8000", public=b"carrel.example", scheme=b"https", prefix=b"/p")


def outside(*given: tuple[bytes, bytes], by_host: bool = False) -> dict[bytes, bytes]:
    return dict(outward(given, by_host=by_host, port=8000, prefix=b"" if by_host else b"/p"))


def test_nothing_of_a_connection_or_of_carrel_goes_in() -> None:
    sent = inside(
        (b"connection", b"close, X-Mine"), (b"x-mine", b"1"), (b"upgrade", b"h2c"), (b"te", b"trailers"),
        (b"transfer-encoding", b"chunked"), (b"content-length", b"5"), (b"carrel-approval", b"a"), (b"host", b"evil"),
        (b"x-forwarded-for", b"10.0.0.1"), (b"x-forwarded-host", b"evil"), (b"forwarded", b"for=1"),
        (b"proxy-authorization", b"Basic x"), (b"sec-websocket-key", b"x"), (b"expect", b"100-continue"),
        (b"accept", b"*/*"),
    )  # fmt: skip
    assert dict(sent) == {
        b"host": b"localhost:8000", b"x-forwarded-host": b"carrel.example", b"x-forwarded-proto": b"https",
        b"x-forwarded-prefix": b"/p", b"accept": b"*/*",
    }  # fmt: skip
    assert len(sent) == 5, "no header twice"


NEVER = (
    b"strict-transport-security", b"clear-site-data", b"alt-svc", b"service-worker-allowed", b"nel", b"report-to",
    b"x-accel-redirect", b"x-sendfile", b"carrel-runs-elsewhere", b"carrel-answered-by", b"x-request-id", b"upgrade",
    b"keep-alive",
)  # fmt: skip


@pytest.mark.parametrize("by_host", [True, False])
@pytest.mark.parametrize("name", NEVER)
def test_what_a_browser_or_a_proxy_would_keep_stays_inside(name: bytes, by_host: bool) -> None:
    assert name not in outside((name, b"x"), (b"etag", b"e"), by_host=by_host)


def test_a_page_by_path_has_no_part_in_the_origin_of_carrel() -> None:
    seen = outside(
        (b"set-cookie", b"a=b"), (b"www-authenticate", b"Basic"), (b"referrer-policy", b"unsafe-url"), (b"etag", b"e")
    )
    assert b"set-cookie" not in seen and b"www-authenticate" not in seen
    assert seen[b"referrer-policy"] == b"no-referrer"
    policy = seen[b"content-security-policy"]
    assert policy.startswith(b"sandbox ") and b"allow-same-origin" not in policy and b"top-navigation" not in policy
    given = [(b"content-security-policy", b"default-src *")]
    both = [value for name, value in outward(given, by_host=False, port=1, prefix=b"") if name == given[0][0]]
    assert both == [given[0][1], policy], "a second policy can only forbid more"


def test_cookies_by_host_are_of_that_host_only() -> None:
    assert outside((b"set-cookie", b"a=b; Domain=example; Path=/"), by_host=True)[b"set-cookie"] == b"a=b; Path=/"
    assert outside((b"set-cookie", b"a=b; domain = x"), by_host=True)[b"set-cookie"] == b"a=b"
    for name in (b"carrel-port", b"__Host-carrel-port", b" __host-CARREL-port"):
        assert b"set-cookie" not in outside((b"set-cookie", name + b"=x; Path=/"), by_host=True)


def test_redirections_stay_inside() -> None:
    def location(value: bytes) -> bytes:
        return outside((b"location", value))[b"location"]

    assert location(b"/login") == b"/p/login"
    assert location(b"http://localhost:8000/login?a=1") == b"/p/login?a=1"
    assert location(b"http://127.0.0.1:8000") == b"/p/"
    assert location(b"http://127.0.0.1:9000/x") == b"http://127.0.0.1:9000/x"
    assert location(b"//elsewhere.example/") == b"//elsewhere.example/"
    assert location(b"login") == b"login"
    assert outside((b"location", b"http://localhost:8000/x"), by_host=True)[b"location"] == b"/x"


def test_the_cookie_of_carrel_never_goes_in() -> None:
    assert without_cookie(b"a=1; carrel-port=x; __Host-carrel-port=y;b=2") == b"a=1; b=2"
    assert access_cookie(b"a=1; carrel-port=x", secure=False) == "x"
    assert access_cookie(b"carrel-port=x", secure=True) is None, "another host could have set it"


TOKENS = st.from_regex(rb"[a-z0-9-]{1,20}", fullmatch=True)
VALUES = st.binary(max_size=40)


@given(st.lists(st.tuples(TOKENS, VALUES), max_size=20), st.booleans())
def test_any_headers_pass_without_what_is_forbidden(given: Headers, by_host: bool) -> None:
    seen = outward(given, by_host=by_host, port=8000, prefix=b"/p")
    assert not any(name in NEVER for name, _ in seen)
    assert by_host or not any(name == b"set-cookie" for name, _ in seen)
    kept = inward(given, host=b"h", public=b"p", scheme=b"http", prefix=b"")
    assert [value for name, value in kept if name == b"host"] == [b"h"]
    assert not any(name in {b"connection", b"transfer-encoding", b"content-length"} for name, _ in kept)
