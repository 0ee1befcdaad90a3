"""Attempts to be taken for somebody else, to take the proxy's place, and to do without it."""

# ruff: noqa: F821 — what an attempt calls is of `within`, beside which it runs

import os
import socket
import stat

import pytest

CLAIMS = {
    "password": "Proxy-Authorization: Basic {basic}\r\n",
    "token": "Proxy-Authorization: Bearer {id}\r\nAuthorization: Bearer {id}\r\n",
    "header-of-carrel": "X-Carrel-Sandbox: {id}\r\nX-Carrel-Context: neighbour\r\nSandbox: {id}\r\n",
    "forwarded-for": "X-Forwarded-For: 127.0.0.3\r\nForwarded: for=127.0.0.3\r\nX-Real-IP: 127.0.0.3\r\nVia: 1.1 {id}\r\n",
    "connection": "Connection: close, {id}\r\nProxy-Connection: {id}\r\n",
}


def claimed(before, host, claim):
    """Ask for a host, with something that says who asks."""
    one = say(before, f"GET http://{host}/smuggled HTTP/1.1\r\nHost: {host}\r\n{claim}\r\n")
    two = say(before, f"CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n{claim}\r\n")
    return [one, two]


@pytest.mark.parametrize("claim", CLAIMS)
def test_claims(evader, neighbour, far, claim):
    """The neighbour may reach the host. Whoever says to be the neighbour may not."""
    other = neighbour.box.info().id
    text = CLAIMS[claim].replace("{id}", other).replace("{basic}", "bmVpZ2hib3VyOng=")
    outcome = evader.attempt(claimed, before="", host=f"forbidden.test:{far.http}", claim=text)
    assert all(answer.startswith("HTTP/1.1 403 ") for answer in outcome.evidence), outcome.evidence
    assert {record.actor for record in outcome.records} == {f"sandbox:{evader.box.info().id}"}
    assert {record.context_id for record in outcome.records} == {"evader"}


PREFACES = {
    "proxy-protocol-1": "PROXY TCP4 127.0.0.3 127.0.0.1 1000 3128\r\n",
    "proxy-protocol-1-unknown": "PROXY UNKNOWN\r\n",
    "proxy-protocol-2": "\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c\x7f\0\0\x03\x7f\0\0\x01\x03\xe8\x0c\x38",
    "proxy-protocol-2-local": "\r\n\r\n\0\r\nQUIT\n\x20\0\0\0",
    "message-of-the-control-plane": '{"op": "attach", "sandbox": "x", "seq": 1}\n',
}


@pytest.mark.parametrize("preface", PREFACES)
def test_prefaces(evader, far, preface):
    outcome = evader.attempt(claimed, before=PREFACES[preface], host=f"allowed.test:{far.http}", claim="")
    assert not [answer for answer in outcome.evidence if "200" in answer[:15]], outcome.evidence


@pytest.mark.parametrize("source", ["127.0.0.2", "127.0.0.3", "127.255.255.254"])
def test_other_sources(evader, far, source):
    """Come from another address of one's own loopback: it is the socket that counts, not the address."""

    def attack(source, host):
        with socket.create_connection(PROXY, PATIENCE_S, (source, 0)) as one:
            send(one, [f"GET http://{host}/smuggled HTTP/1.1\r\nHost: {host}\r\n\r\n"])
            return rest_of(one).decode("latin-1")

    outcome = evader.attempt(attack, source=source, host=f"forbidden.test:{far.http}")
    assert outcome.evidence.startswith("HTTP/1.1 403 ")


def test_control_the_neighbour_is_let_through(neighbour, far):
    answers = neighbour.run(claimed, before="", host=f"forbidden.test:{far.http}", claim="")
    assert [answer[9:12] for answer in answers] == ["200", "200"]


@pytest.mark.parametrize("option", ["none", "SO_REUSEADDR", "SO_REUSEPORT"])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
def test_taking_the_place_of_the_proxy(evader, host, option):
    """Listen where the proxy does."""

    def attack(host, option):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
            if option != "none":
                one.setsockopt(socket.SOL_SOCKET, getattr(socket, option), 1)
            one.bind((host, 3128))
            one.listen()
            return "took it"

    assert evader.attempt(attack, host=host, option=option, decided=False).evidence is None


def test_finding_the_socket_of_the_proxy(evader):
    """Find a process inside that holds the listening socket, or one of another network."""

    def attack():
        import glob

        lines = [line.split() for line in open("/proc/net/tcp").read().splitlines()[1:]]
        listening = {line[9] for line in lines if line[1].endswith(":0C38") and line[3] == "0A"}
        own = os.readlink("/proc/self/ns/net")
        found = []
        for path in [*glob.glob("/proc/[0-9]*/fd/*"), *glob.glob("/proc/[0-9]*/task/*/fd/*")]:
            try:
                target = os.readlink(path)
            except OSError:
                continue
            if target.startswith("socket:[") and target[8:-1] in listening:
                found.append(path)
        for path in glob.glob("/proc/[0-9]*/ns/net"):
            try:
                if os.readlink(path) != own:
                    found.append(path)
            except OSError:
                continue
        return [len(listening), found]

    assert evader.attempt(attack, decided=False).evidence == [1, []]


def test_sockets_of_the_server(evader, governed):
    """Connect to the sockets of the server, of the proxy, and of other sandboxes, by their paths on the host."""

    def attack(paths):
        found = []
        for path in paths:
            for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):
                with socket.socket(socket.AF_UNIX, kind) as one:
                    if one.connect_ex(path) == 0:
                        found.append(path)
        return found

    paths = [
        os.path.join(directory, name)
        for directory, _, names in os.walk(governed.data_dir)
        for name in names
        if stat.S_ISSOCK(os.lstat(os.path.join(directory, name)).st_mode)
    ]
    assert len(paths) >= 2
    assert evader.attempt(attack, paths=paths, decided=False).evidence == []


def test_abstract_sockets(evader, host):
    """Connect to sockets of the host that have no path."""

    def attack(name):
        found = [line.split()[-1] for line in open("/proc/net/unix").read().splitlines()[1:] if "@" in line]
        with socket.socket(socket.AF_UNIX) as one:
            return [found, one.connect_ex("\0" + name) == 0]

    assert evader.attempt(attack, name=host.abstract, decided=False).evidence == [[], False]
    with socket.socket(socket.AF_UNIX) as one:
        assert one.connect_ex("\0" + host.abstract) == 0  # the control: it is there


def reached(host, ports, kind):
    """Connect or send without the proxy."""
    found = []
    for port in ports:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, getattr(socket, kind)) as one:
            one.settimeout(2)
            try:
                one.connect((host, port))
                # What QUIC begins with, for those who look at it.
                one.send(b"\xc3\0\0\0\x01\x08" + os.urandom(8) + b"\0\0" + bytes(1180))
                found.append(one.recv(100).decode("latin-1"))
            except OSError:
                pass
    return found


HOSTS = ["127.0.0.1", "127.0.0.2", "127.0.0.3", "0.0.0.0", "::1", "::ffff:127.0.0.3", "192.0.2.1", "2001:db8::1"]


KINDS = ["SOCK_STREAM", "SOCK_DGRAM"]


@pytest.fixture(scope="module")
def direct(evader, far):
    ports = [far.http, far.tls]
    cases = {f"{host} {kind}": {"host": host, "ports": ports, "kind": kind} for host in HOSTS for kind in KINDS}
    return evader.series(reached, cases)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("host", HOSTS)
def test_without_the_proxy(direct, host, kind):
    """The loopback inside is not the host's, and there is nothing else."""
    assert direct.judged(f"{host} {kind}").evidence == []
    assert direct.records == []


def test_control_without_a_sandbox(far):
    """The same from the host arrives: servers and datagrams are remembered."""
    mark = far.mark()
    for host in ("127.0.0.1", "127.0.0.3", "::1"):
        with socket.create_connection((host, far.http), 5) as one:
            one.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert far.token.encode() in one.makefile("rb").read()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.sendto(b"x", ("127.0.0.3", far.tls))
    with socket.create_connection(("127.0.0.3", far.http), 5) as one:  # one more round, and the datagram is there
        one.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        one.makefile("rb").read()
    sites = [visit.site for visit in far.since(mark)]
    assert all(visit.forbidden for visit in far.since(mark))
    assert "forbidden udp 127.0.0.3" in sites


@pytest.mark.parametrize(
    "made",
    [
        "socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP",
        "socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW",
        "socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6",
        "socket.AF_PACKET, socket.SOCK_RAW, 3",
        "socket.AF_INET, socket.SOCK_SEQPACKET, 132",
        "socket.AF_VSOCK, socket.SOCK_STREAM, 0",
    ],
    ids=["icmp", "ip", "icmp-6", "packets", "sctp", "vsock"],
)
def test_other_protocols(evader, made):
    def attack(made):
        with eval(f"socket.socket({made})"):
            return "made"

    assert evader.attempt(attack, made=made, decided=False).evidence is None
