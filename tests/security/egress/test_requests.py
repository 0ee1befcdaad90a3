"""Attempts with plain requests: another host in one place than in the other, another way to write it, another protocol.

In the texts, `{http}` and its like stand for ports that have a server both on allowed and on forbidden addresses.
"""

# ruff: noqa: F821 — what an attempt calls is of `within`, beside which it runs

import pytest

GET = "GET http://{host}/{path} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n"


def get(host, more="", path="smuggled"):
    return GET.replace("{host}", host).replace("{path}", path).replace("{more}", more)


def filled(text, far):
    for name in ("http", "tls", "other", "retry"):
        text = text.replace("{" + name + "}", str(getattr(far, name)))
    return text


REFUSED = {
    # the host itself
    "forbidden-host": get("forbidden.test:{http}"),
    "forbidden-address": get("127.0.0.3:{http}"),
    "loopback-of-the-host": get("127.0.0.1:{http}"),
    "localhost-of-the-host": get("localhost:{http}"),
    "allowed-host-other-port": get("allowed.test:{other}"),
    "allowed-host-usual-port": get("allowed.test"),
    "websocket-to-a-forbidden-host": get("forbidden.test:{http}", "Connection: Upgrade\r\nUpgrade: websocket\r\n"),
    # two hosts at once
    "host-header-differs": "GET http://allowed.test:{http}/ HTTP/1.1\r\nHost: forbidden.test:{http}\r\n\r\n",
    "host-header-differs-in-port": "GET http://allowed.test:{http}/ HTTP/1.1\r\nHost: allowed.test:{other}\r\n\r\n",
    "url-differs": "GET http://forbidden.test:{http}/ HTTP/1.1\r\nHost: allowed.test:{http}\r\n\r\n",
    "two-host-headers": get("allowed.test:{http}", "Host: forbidden.test:{http}\r\n"),
    "two-host-headers-the-other-way": "GET http://allowed.test:{http}/ HTTP/1.1\r\nHost: forbidden.test\r\nHost: allowed.test:{http}\r\n\r\n",
    "the-same-host-header-twice": get("allowed.test:{http}", "host: allowed.test:{http}\r\n"),
    "host-header-is-a-list": "GET http://allowed.test:{http}/ HTTP/1.1\r\nHost: allowed.test:{http}, forbidden.test\r\n\r\n",
    "host-header-is-folded": "GET http://allowed.test:{http}/ HTTP/1.1\r\nHost: allowed.test:{http}\r\n forbidden.test\r\n\r\n",
    "host-header-has-a-user": "GET http://allowed.test:{http}/ HTTP/1.1\r\nHost: allowed.test:{http}@forbidden.test:{http}\r\n\r\n",
    "host-header-with-space-before-the-colon": "GET http://allowed.test:{http}/ HTTP/1.1\r\nHost: allowed.test:{http}\r\nHost : forbidden.test\r\n\r\n",
    "host-header-after-a-space": "GET http://allowed.test:{http}/ HTTP/1.1\r\n Host: forbidden.test\r\nHost: allowed.test:{http}\r\n\r\n",
    "host-header-with-a-path": "GET http://allowed.test:{http}/ HTTP/1.1\r\nHost: allowed.test:{http}/x\r\n\r\n",
    "no-host-header": "GET http://forbidden.test:{http}/ HTTP/1.1\r\n\r\n",
    "empty-host-header": "GET http://allowed.test:{http}/ HTTP/1.1\r\nHost:\r\n\r\n",
    "user-before-the-host": get("allowed.test:{http}@forbidden.test:{http}"),
    "forbidden-user": get("forbidden.test@allowed.test:{http}"),
    "backslash-before-the-host": get("allowed.test:{http}\\@forbidden.test:{http}"),
    "fragment-before-the-host": get("forbidden.test:{http}#@allowed.test:{http}"),
    "query-before-the-host": "GET http://forbidden.test:{http}?@allowed.test/ HTTP/1.1\r\nHost: forbidden.test:{http}\r\n\r\n",
    "semicolon-before-the-host": get("allowed.test;forbidden.test:{http}"),
    "port-twice": get("forbidden.test:{http}:{http}"),
    # other spellings
    "percent-encoded-host": get("forbidden%2etest:{http}"),
    "percent-encoded-letter": get("%66orbidden.test:{http}"),
    "percent-encoded-end": get("allowed.test%00.forbidden.test:{http}"),
    "upper-case-forbidden-host": get("FORBIDDEN.Test:{http}"),
    "trailing-dot-of-a-forbidden-host": get("forbidden.test.:{http}"),
    "two-trailing-dots": get("allowed.test..:{http}"),
    "leading-dot": get(".allowed.test:{http}"),
    "empty-label": get("allowed..test:{http}"),
    "host-above-the-allowed": get("test:{http}"),
    "host-below-the-allowed": get("forbidden.allowed.test:{http}"),
    "host-that-ends-alike": get("notallowed.test:{http}"),
    "host-that-begins-alike": get("allowed.test.forbidden.test:{http}"),
    "cyrillic-letter": get("аllowed.test:{http}".encode().decode("latin-1")),
    "cyrillic-letter-in-punycode": get("xn--llowed-2fe.test:{http}"),
    "full-width-dot": get("allowed。test:{http}".encode().decode("latin-1")),
    "soft-hyphen": get("allo\u00adwed.test:{http}".encode().decode("latin-1")),
    "latin-1-letter": get("ällowed.test:{http}"),
    "wrong-punycode": get("xn--allowed.test:{http}"),
    "very-long-name": get("a." * 200 + "allowed.test:{http}"),
    "very-long-label": get("a" * 64 + ".names.test:{http}"),
    "nul-in-the-host": get("allowed.test\0.forbidden.test:{http}"),
    "space-in-the-host": get("allowed.test forbidden.test:{http}"),
    "tab-in-the-host": get("allowed.test\tforbidden.test:{http}"),
    # forms and versions
    "http-1.0-without-host": "GET http://forbidden.test:{http}/ HTTP/1.0\r\n\r\n",
    "http-0.9": "GET http://forbidden.test:{http}/\r\n\r\n",
    "http-1.2": "GET http://allowed.test:{http}/ HTTP/1.2\r\nHost: allowed.test:{http}\r\n\r\n",
    "http-2-version": "GET http://allowed.test:{http}/ HTTP/2.0\r\nHost: allowed.test:{http}\r\n\r\n",
    "http-2-prior-knowledge": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0",
    "https-in-the-clear": "GET https://allowed.test:{tls}/ HTTP/1.1\r\nHost: allowed.test:{tls}\r\n\r\n",
    "ftp": "GET ftp://forbidden.test:{http}/ HTTP/1.1\r\nHost: forbidden.test:{http}\r\n\r\n",
    "gopher": "GET gopher://forbidden.test:{http}/ HTTP/1.1\r\nHost: forbidden.test:{http}\r\n\r\n",
    "file": "GET file:///etc/passwd HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
    "no-scheme": "GET forbidden.test:{http}/ HTTP/1.1\r\nHost: forbidden.test:{http}\r\n\r\n",
    "one-slash": "GET http:/forbidden.test:{http}/ HTTP/1.1\r\nHost: forbidden.test:{http}\r\n\r\n",
    "three-slashes": "GET http:///forbidden.test:{http}/ HTTP/1.1\r\nHost: forbidden.test:{http}\r\n\r\n",
    "no-host-but-a-path": "GET /smuggled HTTP/1.1\r\nHost: forbidden.test:{http}\r\n\r\n",
    "path-that-is-a-host": "GET //forbidden.test:{http}/smuggled HTTP/1.1\r\nHost: forbidden.test:{http}\r\n\r\n",
    "path-that-is-a-url": "GET /http://forbidden.test:{http}/ HTTP/1.1\r\nHost: forbidden.test:{http}\r\n\r\n",
    "lower-case-method": get("allowed.test:{http}").replace("GET", "get", 1),
    "unknown-method": get("allowed.test:{http}").replace("GET", "SMUGGLE", 1),
    "trace": get("allowed.test:{http}").replace("GET", "TRACE", 1),
    "connect-with-a-url": get("allowed.test:{http}").replace("GET", "CONNECT", 1),
    "tabs-between-the-words": "GET\thttp://allowed.test:{http}/\tHTTP/1.1\r\nHost: allowed.test:{http}\r\n\r\n",
    "empty-line-before": "\r\n" + get("forbidden.test:{http}"),
    # line ends and injection
    "line-feed-in-the-target": "GET http://allowed.test:{http}/\nHost:forbidden.test HTTP/1.1\r\nHost: allowed.test:{http}\r\n\r\n",
    "line-ends-in-the-target": "GET http://allowed.test:{http}/ HTTP/1.1\r\nHost: allowed.test:{http}\r\n\r\nGET http://forbidden.test:{http}/ HTTP/1.1\r\nHost: allowed.test\r\n\r\n HTTP/1.1\r\n\r\n",
    "line-end-in-the-method": "GET\r\nX: http://allowed.test:{http}/ HTTP/1.1\r\nHost: allowed.test:{http}\r\n\r\n",
    "line-feed-in-a-header": get("allowed.test:{http}", "X: a\nHost: forbidden.test\r\n"),
    "carriage-return-in-a-header": get("allowed.test:{http}", "X: a\rHost: forbidden.test\r\n"),
    "line-feeds-alone": get("allowed.test:{http}").replace("\r\n", "\n") + "\r\n\r\n",
    "nul-in-a-header": get("allowed.test:{http}", "X: a\0b\r\n"),
    "nul-in-a-header-name": get("allowed.test:{http}", "X\0Y: a\r\n"),
    "nul-in-the-path": get("allowed.test:{http}", path="a\0smuggled"),
    "vertical-tab-in-a-header-name": get("allowed.test:{http}", "Host\x0b: forbidden.test\r\n"),
    "header-without-a-colon": get("allowed.test:{http}", "forbidden.test\r\n"),
    # size
    "head-of-a-megabyte": get("allowed.test:{http}", "X: " + "a" * (1 << 20) + "\r\n"),
    "thousands-of-headers": get("allowed.test:{http}", "X: a\r\n" * 3000),
    "path-of-64-kilobytes": get("allowed.test:{http}", path="a" * 65536),
}  # fmt: skip


def said(text):
    """Say it to the proxy."""
    return say(text)


@pytest.fixture(scope="module")
def refused(evader, far):
    return evader.series(said, {name: {"text": filled(text, far)} for name, text in REFUSED.items()})


@pytest.mark.parametrize("attempt", REFUSED)
def test_refused(refused, attempt):
    """Something about it is not as it must be: not a byte of it arrives anywhere."""
    first = attempt == "line-ends-in-the-target"  # which is two requests, and the first is in order
    outcome = refused.judged(attempt, passes=first)
    statuses = [line.split(" ")[1] for line in outcome.evidence.split("\r\n") if line.startswith("HTTP/1.1 ")]
    assert all(status[0] in "45" for status in (statuses[1:] if first else statuses)), outcome.evidence


def test_refusals_are_in_the_log(refused):
    """Each once."""
    assert len(refused.refusals) == len(REFUSED)


HARMLESS = {
    "as-it-should-be": get("allowed.test:{http}", path="control"),
    "upper-case": get("ALLOWED.test:{http}", path="control"),
    "one-trailing-dot": get("allowed.test.:{http}", path="control"),
    "http-1.0": "GET http://allowed.test:{http}/control HTTP/1.0\r\n\r\n",
    "encoded-line-end-in-the-path": get("allowed.test:{http}", path="control%0d%0aHost:%20forbidden.test"),
    "url-in-the-path": get("allowed.test:{http}", path="control?http://forbidden.test/"),
    "upgrade-to-http-2": get("allowed.test:{http}", "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n", path="control"),
    "upgrade-to-tls": get("allowed.test:{http}", "Connection: Upgrade\r\nUpgrade: TLS/1.2\r\n", path="control"),
    "connection-names-the-host-header": get("allowed.test:{http}", "Connection: Host, close\r\n", path="control"),
    "connection-names-what-proxies-add": get("allowed.test:{http}", "Connection: close, X-Forwarded-For, Via, Content-Length\r\n", path="control"),
    "proxy-headers": get("allowed.test:{http}", "Proxy-Connection: keep-alive\r\nProxy-Authorization: Basic YTph\r\nKeep-Alive: 5\r\nTE: trailers\r\nTrailer: Host\r\n", path="control"),
    "via-loop": get("allowed.test:{http}", "Via: 1.1 carrel, 1.1 127.0.0.1:3128\r\nMax-Forwards: 0\r\n", path="control"),
    "other-names-for-the-host": get("allowed.test:{http}", "X-Forwarded-Host: forbidden.test\r\nForwarded: host=forbidden.test\r\n", path="control"),
}  # fmt: skip


@pytest.fixture(scope="module")
def harmless(evader, far):
    return evader.series(said, {name: {"text": filled(text, far)} for name, text in HARMLESS.items()})


@pytest.mark.parametrize("attempt", HARMLESS)
def test_written_anew(harmless, far, attempt):
    """It may pass, since it is for an allowed host; what arrives there says nothing else. The control of this family."""
    outcome = harmless.judged(attempt, passes=True)
    assert outcome.evidence.startswith("HTTP/1.1 200 "), outcome.evidence
    (target,) = outcome.targets
    assert target.startswith("/control")
    (visit,) = outcome.visits
    assert visit.requests[0].all("host") == [f"allowed.test:{far.http}"]
    assert not visit.requests[0].all("upgrade")


def test_control_forbidden_servers_are_there(neighbour, far):
    """Who may reach what the evader may not does reach it, with the very same bytes."""

    def attack(texts):
        return [say(text) for text in texts]

    texts = [filled(REFUSED[name], far) for name in ("forbidden-host", "forbidden-address", "http-1.0-without-host")]
    mark = far.mark()
    assert all(far.token in answer for answer in neighbour.run(attack, texts=texts))
    assert [visit.site for visit in far.since(mark)] == ["forbidden http 127.0.0.3"] * 3


@pytest.mark.parametrize("tool", ["curl", "urllib"])
def test_redirect_to_a_forbidden_host(evader, far, tool):
    """An allowed server sends the client on to a forbidden one; to itself it may."""

    def attack(tool, url):
        if tool == "curl":
            return curl("-L", url)
        import urllib.request

        try:
            return urllib.request.urlopen(url, timeout=PATIENCE_S).read().decode()
        except urllib.error.HTTPError as error:
            return error.read().decode()

    base = f"http://allowed.test:{far.http}/redirect?"
    outcome = evader.attempt(attack, tool=tool, url=f"{base}http://forbidden.test:{far.http}/", passes=True)
    assert "denied_by_policy" in outcome.evidence
    assert [record.arguments["host"] for record in outcome.refusals] == ["forbidden.test"]
    outcome = evader.attempt(
        attack, tool=tool, url=f"{base}http://allowed.test:{far.http}/control", passes=True, decided=False
    )
    assert "welcome to /control" in outcome.evidence


def test_switch_that_nobody_asked_for(evader, far):
    """The server changes the protocol by itself: what follows would be unread."""

    def attack(host):
        request = f"GET http://{host}/switch HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
        return say(request, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nsmuggled")

    outcome = evader.attempt(attack, host=f"allowed.test:{far.http}", passes=True)
    assert outcome.evidence.startswith("HTTP/1.1 502 ")
    assert not any(b"PRI" in visit.raw for visit in outcome.visits)


def test_websocket(evader, far):
    """A WebSocket to an allowed host works; one whose opening is for another host does not begin."""

    def attack(host, named):
        upgrade = (
            "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n"
        )
        return say(f"GET http://{host}/websocket HTTP/1.1\r\nHost: {named}\r\n{upgrade}\r\n")

    here, there = f"allowed.test:{far.http}", f"forbidden.test:{far.http}"
    assert evader.attempt(attack, host=here, named=here, passes=True, decided=False).evidence.startswith("HTTP/1.1 101")
    assert evader.attempt(attack, host=here, named=there).evidence.startswith("HTTP/1.1 400 ")
    assert evader.attempt(attack, host=there, named=there).evidence.startswith("HTTP/1.1 403 ")
