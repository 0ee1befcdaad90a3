"""Attempts inside TLS that the proxy opens: there the host of each request counts, not only that of the tunnel."""

# ruff: noqa: F821 — what an attempt calls is of `within`, beside which it runs

import pytest
from tests.security.egress.test_requests import filled

REQUESTS = {
    "another-host": "GET /smuggled HTTP/1.1\r\nHost: forbidden.test:{tls}\r\n\r\n",
    "another-allowed-host": "GET /smuggled HTTP/1.1\r\nHost: allowed.test:{tls}\r\n\r\n",
    "another-port": "GET /smuggled HTTP/1.1\r\nHost: inspected.test:{other}\r\n\r\n",
    "two-hosts": "GET /smuggled HTTP/1.1\r\nHost: inspected.test:{tls}\r\nHost: forbidden.test\r\n\r\n",
    "no-host": "GET /smuggled HTTP/1.1\r\n\r\n",
    "folded-host": "GET /smuggled HTTP/1.1\r\nHost: inspected.test:{tls}\r\n forbidden.test\r\n\r\n",
    "url-of-another-host": "GET https://forbidden.test:{tls}/smuggled HTTP/1.1\r\nHost: inspected.test:{tls}\r\n\r\n",
    "url-of-another-host-without-host": "GET https://forbidden.test:{tls}/smuggled HTTP/1.0\r\n\r\n",
    "url-in-the-clear": "GET http://inspected.test:{tls}/smuggled HTTP/1.1\r\nHost: inspected.test:{tls}\r\n\r\n",
    "url-with-a-user": "GET https://inspected.test:{tls}@forbidden.test/ HTTP/1.1\r\nHost: inspected.test:{tls}\r\n\r\n",
    "tunnel": "CONNECT forbidden.test:{tls} HTTP/1.1\r\nHost: inspected.test:{tls}\r\n\r\n",
    "trace": "TRACE /smuggled HTTP/1.1\r\nHost: inspected.test:{tls}\r\n\r\n",
    "http-2": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0",
    "length-and-chunks": "POST /x HTTP/1.1\r\nHost: inspected.test:{tls}\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\n\r\n",
    "line-feeds": "GET /x HTTP/1.1\r\nHost: inspected.test:{tls}\r\nX: y\nHost: forbidden.test\r\n\r\n",
    "no-http-at-all": "SSH-2.0-OpenSSH\r\n\r\n",
}  # fmt: skip


def fronted(where, name, text, protocols=()):
    """Say it inside TLS for a name."""
    return secure(connect(where), name, text, protocols)


@pytest.fixture(scope="module")
def fronting(evader, far):
    given = {"where": f"inspected.test:{far.tls}", "name": "inspected.test"}
    return evader.series(fronted, {name: {"text": filled(text, far), **given} for name, text in REQUESTS.items()})


@pytest.mark.parametrize("attempt", REQUESTS)
def test_fronting(fronting, attempt):
    """The tunnel and its TLS are for the inspected host, the request is not. The server gets TLS, and no request."""
    outcome = fronting.judged(attempt, passes=True)
    assert outcome.targets == []
    assert outcome.evidence.startswith(("HTTP/1.1 4", "HTTP/1.1 5")), outcome.evidence


def test_refusals_are_in_the_log(fronting):
    """Each once, as a request."""
    assert [record.name for record in fronting.refusals] == ["request"] * len(REQUESTS)


def test_second_request_for_another_host(evader, far):
    """The first request is in order, the second one of the same connection is not."""
    one = f"GET /control HTTP/1.1\r\nHost: inspected.test:{far.tls}\r\n\r\n"
    text = one + filled(REQUESTS["another-host"], far)
    outcome = evader.attempt(fronted, where=f"inspected.test:{far.tls}", name="inspected.test", text=text, passes=True)
    assert outcome.targets == ["/control"]
    assert "HTTP/1.1 421 " in outcome.evidence


@pytest.mark.parametrize("name", ["forbidden.test", "allowed.test", None])
def test_tls_for_another_name(evader, far, name):
    """The tunnel is for the inspected host, the TLS inside it is not."""
    text = filled(REQUESTS["another-host"], far)
    outcome = evader.attempt(fronted, where=f"inspected.test:{far.tls}", name=name, text=text)
    assert outcome.evidence.startswith("TLS failed")


def test_http_2_alone(evader, far):
    """A client that wants HTTP/2 gets HTTP/1.1 or nothing: what cannot be read does not pass."""
    text = REQUESTS["http-2"]
    where = f"inspected.test:{far.tls}"
    outcome = evader.attempt(fronted, where=where, name="inspected.test", text=text, protocols=["h2"], passes=True)
    assert outcome.targets == []


def test_plain_request_in_a_tunnel_that_is_inspected(evader, far):
    """Without TLS the host of a request is seen all the same."""

    def attack(where, host):
        return through(connect(where), f"GET /smuggled HTTP/1.1\r\nHost: {host}\r\n\r\n")

    outcome = evader.attempt(attack, where=f"inspected.test:{far.http}", host=f"forbidden.test:{far.http}")
    assert "HTTP/1.1 421 " in outcome.evidence


def test_control_inspected_requests(evader, far):
    """A request for the host itself arrives, by path and by URL, and each is in the log with its path."""
    host = f"inspected.test:{far.tls}"
    texts = [
        f"GET /control HTTP/1.1\r\nHost: {host}\r\n\r\n",
        f"GET https://{host}/control HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n",
    ]
    outcome = evader.attempt(
        fronted, where=host, name="inspected.test", text="".join(texts), passes=True, decided=False
    )
    assert outcome.targets == ["/control"] * 2
    paths = [record.arguments.get("path") for record in outcome.records if record.arguments.get("inspected")]
    assert paths.count("/control") == 2


def test_control_fronting_works_where_nothing_is_inspected(evader, far):
    """So it is the inspection that ends it: in TLS that stays closed, nobody sees the host of a request."""

    def attack(where, host):
        request = f"GET /control HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        return secure(connect(where), "allowed.test", request)

    assert "welcome" in evader.run(attack, where=f"allowed.test:{far.tls}", host="forbidden.test")
