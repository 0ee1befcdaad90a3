"""Attempts with tunnels, by CONNECT and by SOCKS: to ports and hosts that are not allowed, with other things inside."""

# ruff: noqa: F821 — what an attempt calls is of `within`, beside which it runs

import pytest
from tests.security.egress.test_requests import filled

CONNECTS = {
    "forbidden-host": "CONNECT forbidden.test:{tls} HTTP/1.1\r\n\r\n",
    "forbidden-host-under-an-allowed-name": "CONNECT forbidden.test:{tls} HTTP/1.1\r\nHost: allowed.test:{tls}\r\n\r\n",
    "allowed-host-under-a-forbidden-name": "CONNECT allowed.test:{tls} HTTP/1.1\r\nHost: forbidden.test:{tls}\r\n\r\n",
    "port-of-ssh": "CONNECT allowed.test:22 HTTP/1.1\r\n\r\n",
    "port-of-mail": "CONNECT allowed.test:25 HTTP/1.1\r\n\r\n",
    "port-of-names": "CONNECT allowed.test:53 HTTP/1.1\r\n\r\n",
    "other-port-that-answers": "CONNECT allowed.test:{other} HTTP/1.1\r\n\r\n",
    "port-0": "CONNECT allowed.test:0 HTTP/1.1\r\n\r\n",
    "port-65536": "CONNECT allowed.test:65536 HTTP/1.1\r\n\r\n",
    "port-that-wraps-around": "CONNECT allowed.test:{wrapped} HTTP/1.1\r\n\r\n",
    "port-below-zero": "CONNECT allowed.test:-22 HTTP/1.1\r\n\r\n",
    "port-with-a-plus": "CONNECT allowed.test:+{other} HTTP/1.1\r\n\r\n",
    "port-with-a-zero-before": "CONNECT allowed.test:0{tls} HTTP/1.1\r\n\r\n",
    "port-in-hexadecimal": "CONNECT allowed.test:0x16 HTTP/1.1\r\n\r\n",
    "port-of-other-digits": "CONNECT allowed.test:\u00b2\u00b2 HTTP/1.1\r\n\r\n",
    "port-by-name": "CONNECT allowed.test:ssh HTTP/1.1\r\n\r\n",
    "empty-port": "CONNECT allowed.test: HTTP/1.1\r\n\r\n",
    "no-port": "CONNECT allowed.test HTTP/1.1\r\n\r\n",
    "two-ports": "CONNECT allowed.test:{tls}:{other} HTTP/1.1\r\n\r\n",
    "two-hosts": "CONNECT allowed.test:{tls},forbidden.test:{tls} HTTP/1.1\r\n\r\n",
    "with-a-user": "CONNECT allowed.test:{tls}@forbidden.test:{tls} HTTP/1.1\r\n\r\n",
    "with-a-scheme": "CONNECT https://allowed.test:{tls} HTTP/1.1\r\n\r\n",
    "with-a-path": "CONNECT allowed.test:{tls}/x HTTP/1.1\r\n\r\n",
    "with-a-body": "CONNECT allowed.test:{tls} HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
    "with-chunks": "CONNECT allowed.test:{tls} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "with-a-line-end": "CONNECT allowed.test:{tls}\r\nHost: forbidden.test HTTP/1.1\r\n\r\n",
    "with-an-encoded-line-end": "CONNECT allowed.test%0d%0a:{tls} HTTP/1.1\r\n\r\n",
    "in-lower-case": "connect forbidden.test:{tls} HTTP/1.1\r\n\r\n",
    "of-udp": "CONNECT /.well-known/masque/udp/forbidden.test/{tls}/ HTTP/1.1\r\nHost: allowed.test\r\nUpgrade: connect-udp\r\nConnection: Upgrade\r\n\r\n",
    # the proxy as its own target, and what is called local
    "the-proxy-itself": "CONNECT 127.0.0.1:3128 HTTP/1.1\r\n\r\n",
    "the-proxy-by-an-allowed-name": "CONNECT allowed.test:3128 HTTP/1.1\r\n\r\n",
    "the-proxy-by-an-allowed-address": "CONNECT 127.0.0.2:3128 HTTP/1.1\r\n\r\n",
    "the-proxy-by-localhost": "CONNECT localhost:3128 HTTP/1.1\r\n\r\n",
    "the-proxy-by-ipv6": "CONNECT [::1]:3128 HTTP/1.1\r\n\r\n",
    "the-proxy-by-a-mapped-address": "CONNECT [::ffff:127.0.0.2]:3128 HTTP/1.1\r\n\r\n",
    "the-proxy-by-no-address": "CONNECT 0.0.0.0:3128 HTTP/1.1\r\n\r\n",
    "the-proxy-as-a-url": "GET http://allowed.test:3128/ HTTP/1.1\r\nHost: allowed.test:3128\r\n\r\n",
    "the-host's-loopback": "CONNECT 127.0.0.1:{http} HTTP/1.1\r\n\r\n",
    "the-host's-loopback-by-name": "CONNECT localhost:{http} HTTP/1.1\r\n\r\n",
    "the-host's-loopback-by-ipv6": "CONNECT [::1]:{http} HTTP/1.1\r\n\r\n",
}  # fmt: skip


def said(text):
    """Say it to the proxy."""
    return say(text)


@pytest.fixture(scope="module")
def connects(evader, far):
    texts = {name: filled(text.replace("{wrapped}", str(65536 + far.tls)), far) for name, text in CONNECTS.items()}
    return evader.series(
        said, {name: {"text": f"{text}GET /smuggled HTTP/1.1\r\n\r\n"} for name, text in texts.items()}
    )


@pytest.mark.parametrize("attempt", CONNECTS)
def test_not_opened(connects, attempt):
    outcome = connects.judged(attempt)
    assert outcome.evidence.startswith(("HTTP/1.1 4", "HTTP/1.1 5")), outcome.evidence


def test_refusals_are_in_the_log(connects):
    """Each once."""
    assert len(connects.refusals) == len(CONNECTS)


INSIDE = {
    "request-for-another-host": "GET /smuggled HTTP/1.1\r\nHost: forbidden.test:{http}\r\n\r\n",
    "request-for-two-hosts": "GET /smuggled HTTP/1.1\r\nHost: allowed.test:{http}\r\nHost: forbidden.test\r\n\r\n",
    "request-for-no-host": "GET /smuggled HTTP/1.1\r\n\r\n",
    "request-for-another-port": "GET /smuggled HTTP/1.1\r\nHost: allowed.test:{other}\r\n\r\n",
    "request-with-a-url": "GET http://forbidden.test:{http}/ HTTP/1.1\r\nHost: forbidden.test:{http}\r\n\r\n",
    "request-with-a-url-and-an-allowed-host": "GET http://forbidden.test:{http}/ HTTP/1.1\r\nHost: allowed.test:{http}\r\n\r\n",
    "request-with-bare-line-feeds": "GET /smuggled HTTP/1.1\nHost: forbidden.test\n\n\r\n\r\n",
    "request-of-http-2": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "tunnel-in-the-tunnel": "CONNECT forbidden.test:{http} HTTP/1.1\r\nHost: allowed.test:{http}\r\n\r\n",
    "another-tunnel-to-the-same-host": "CONNECT allowed.test:{http} HTTP/1.1\r\nHost: allowed.test:{http}\r\n\r\n",
    "trace": "TRACE /smuggled HTTP/1.1\r\nHost: allowed.test:{http}\r\n\r\n",
    "ssh": "SSH-2.0-OpenSSH_9.2\r\n",
    "mail": "EHLO forbidden.test\r\n",
    "ftp": "USER smuggled\r\n",
    "irc": "nick smuggled\r\n",
    "redis": "*1\r\n$4\r\nPING\r\n",
    "socks": "\x05\x01\x00",
    "socks-4": "\x04\x01\x1f\x90\x7f\0\0\x03\0",
    "proxy-protocol-1": "PROXY TCP4 127.0.0.3 127.0.0.3 1 2\r\nGET /smuggled HTTP/1.1\r\nHost: allowed.test:{http}\r\n\r\n",
    "proxy-protocol-2": "\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c\x7f\0\0\x03\x7f\0\0\x03\0\x01\0\x02GET /smuggled HTTP/1.1\r\n\r\n",
    "binary": "\0\x01\x02\x03smuggled",
    "nothing": "",
}  # fmt: skip


def inside(way, host, port, text):
    """Say it inside a tunnel."""
    return through(connect(f"{host}:{port}") if way == "connect" else socks(host, port), text)


@pytest.fixture(scope="module")
def insides(evader, far):
    texts = {name: filled(text, far) for name, text in INSIDE.items()}
    given = {"host": "allowed.test", "port": far.http}
    return {
        way: evader.series(inside, {name: {"way": way, "text": text, **given} for name, text in texts.items()})
        for way in ("connect", "socks")
    }


@pytest.mark.parametrize(
    ("attempt", "way"),
    [(attempt, way) for way in ("connect", "socks") for attempt in INSIDE],
)
def test_not_led_on(insides, attempt, way):
    """The tunnel is to an allowed host, and what is said inside is not for it, or nobody can tell."""
    outcome = insides[way].judged(attempt)
    assert outcome.evidence.startswith("opened"), outcome.evidence


@pytest.mark.parametrize("way", ["connect", "socks"])
def test_what_was_not_led_on_is_in_the_log(insides, way):
    """Each once."""
    found = [(record.name, record.arguments["host"]) for record in insides[way].refusals]
    assert found == [("connect", "allowed.test")] * len(INSIDE)


@pytest.mark.parametrize("way", ["connect", "socks"])
def test_second_request_for_another_host(evader, far, way):
    """The first request in a tunnel is in order, the second, sent along with it, is for another host."""
    one = f"GET /control HTTP/1.1\r\nHost: allowed.test:{far.http}\r\n\r\n"
    two = f"GET /smuggled HTTP/1.1\r\nHost: forbidden.test:{far.http}\r\n\r\n"
    outcome = evader.attempt(inside, way=way, host="allowed.test", port=far.http, text=one + two, passes=True)
    assert outcome.targets == ["/control"]
    assert "HTTP/1.1 421 " in outcome.evidence


@pytest.mark.parametrize("way", ["connect", "socks"])
def test_control_what_is_said_inside(evader, neighbour, far, way):
    """A request for the tunnel's own host arrives; so does anything at all where the host may be opaque."""
    request = f"GET /control HTTP/1.1\r\nHost: allowed.test:{far.http}\r\n\r\n"
    outcome = evader.attempt(
        inside, way=way, host="allowed.test", port=far.http, text=request * 2, passes=True, decided=False
    )
    assert outcome.targets == ["/control"] * 2
    mark = far.mark()
    evader.run(inside, way=way, host="opaque.test", port=far.http, text=INSIDE["ssh"])
    assert [bytes(visit.raw) for visit in far.since(mark)] == [b"SSH-2.0-OpenSSH_9.2\r\n"]
    reached = neighbour.run(
        inside, way=way, host="forbidden.test", port=far.http, text=request.replace("allowed.test", "forbidden.test")
    )
    assert far.token in reached


ORDERS = {
    "forbidden-name": 'order("forbidden.test", port)',
    "forbidden-address": 'order(bytes([127, 0, 0, 3]), port)',
    "loopback-of-the-host": 'order(bytes([127, 0, 0, 1]), port)',
    "no-address": 'order(bytes(4), port)',
    "metadata": 'order(bytes([169, 254, 169, 254]), port)',
    "private-address": 'order(bytes([10, 0, 0, 1]), port)',
    "ipv6-loopback": 'order(socket.inet_pton(socket.AF_INET6, "::1"), port)',
    "ipv6-of-no-address": 'order(bytes(16), port)',
    "ipv6-mapped": 'order(socket.inet_pton(socket.AF_INET6, "::ffff:127.0.0.3"), port)',
    "ipv6-compatible": 'order(socket.inet_pton(socket.AF_INET6, "::127.0.0.3"), port)',
    "ipv6-nat64": 'order(socket.inet_pton(socket.AF_INET6, "64:ff9b::127.0.0.3"), port)',
    "ipv6-6to4": 'order(socket.inet_pton(socket.AF_INET6, "2002:7f00:3::"), port)',
    "address-as-a-name": 'order("127.0.0.3", port)',
    "number-as-a-name": 'order("2130706435", port)',
    "hexadecimal-as-a-name": 'order("0x7f000003", port)',
    "octal-as-a-name": 'order("0177.0.0.3", port)',
    "ipv6-as-a-name": 'order("::1", port)',
    "ipv6-in-brackets-as-a-name": 'order("[::ffff:127.0.0.3]", port)',
    "name-with-a-port": 'order("allowed.test:22", port)',
    "name-with-a-nul": 'order("allowed.test\\0.forbidden.test", port)',
    "name-with-a-line-end": 'order("allowed.test\\r\\nforbidden.test", port)',
    "name-that-is-empty": 'order("", port)',
    "name-of-255-bytes": 'order("a" * 255, port)',
    "name-that-is-not-ascii": 'order("\\xd0\\xb0llowed.test", port)',
    "port-0": 'order("allowed.test", 0)',
    "port-of-ssh": 'order("allowed.test", 22)',
    "bind": 'order("allowed.test", port, command=2)',
    "udp": 'order("allowed.test", port, command=3)',
    "resolve": 'order("forbidden.test", port, command=0xF0)',
    "command-0": 'order("allowed.test", port, command=0)',
    "reserved-byte": 'order("allowed.test", port, reserved=1)',
    "another-version": 'order("allowed.test", port, version=4)',
    "address-of-no-kind": 'b"\\x05\\x01\\0\\x02" + bytes(6)',
    "the-proxy-itself": 'order(bytes([127, 0, 0, 1]), 3128)',
    "the-proxy-by-an-allowed-name": 'order("allowed.test", 3128)',
}  # fmt: skip


def ordered(made, port):
    """Give a SOCKS order, and say something in case it is followed."""
    return say(b"\x05\x01\x00", eval(made), b"GET /smuggled HTTP/1.1\r\n\r\n")


@pytest.fixture(scope="module")
def orders(evader, far):
    return evader.series(ordered, {name: {"made": made, "port": far.http} for name, made in ORDERS.items()})


@pytest.mark.parametrize("attempt", ORDERS)
def test_socks_orders(orders, attempt):
    outcome = orders.judged(attempt)
    assert outcome.evidence.startswith("\x05\x00\x05"), outcome.evidence
    assert outcome.evidence[3] != "\x00", outcome.evidence


def test_refused_orders_are_in_the_log(orders):
    """Each once."""
    assert len(orders.refusals) == len(ORDERS)


GREETINGS = {
    "socks-4": "\x04\x01{port}\x7f\0\0\x03user\0",
    "socks-4a": "\x04\x01{port}\0\0\0\x01user\0forbidden.test\0",
    "password-only": "\x05\x01\x02\x01\x01a\x01a\x05\x01\0\x01\x7f\0\0\x03{port}",
    "no-method": "\x05\0\x05\x01\0\x01\x7f\0\0\x03{port}",
    "order-without-greeting": "\x05\x01\0\x01\x7f\0\0\x03{port}",
    "socks-6": "\x06\x01\0\x01\x7f\0\0\x03{port}",
    "tls-to-the-proxy": "\x16\x03\x01\0\x05\x01\0\0\x01\0",
}


@pytest.fixture(scope="module")
def greetings(evader, far):
    port = far.http.to_bytes(2, "big").decode("latin-1")
    return evader.series(said, {name: {"text": text.replace("{port}", port)} for name, text in GREETINGS.items()})


@pytest.mark.parametrize("attempt", GREETINGS)
def test_socks_greetings(greetings, attempt):
    """Other versions and methods are not spoken. There is nothing to decide, since nothing was understood."""
    outcome = greetings.judged(attempt)
    assert "\x5a" not in outcome.evidence[:2]


@pytest.mark.parametrize("host", ["allowed.test", "127.0.0.2"])
def test_control_socks(evader, neighbour, far, host):
    """Names and addresses that are allowed are reached by SOCKS; the forbidden one by whom it is allowed."""

    def attack(made, port, host):
        return through(
            socks(bytes(map(int, host.split("."))) if made else host, port),
            f"GET /control HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n",
        )

    given = {"made": host[0].isdigit(), "port": far.http}
    outcome = evader.attempt(attack, **given, host=host, passes=True, decided=False)
    assert outcome.targets == ["/control"]
    other = {"allowed.test": "forbidden.test", "127.0.0.2": "127.0.0.3"}[host]
    assert far.token in neighbour.run(attack, **given, host=other)
