"""Attempts with TLS inside a tunnel to an allowed host: for another name, for none, for one that nobody can read."""

# ruff: noqa: F821 — what an attempt calls is of `within`, beside which it runs

import pytest

HELLOS = {
    "spoofed-name": 'hello("forbidden.test")',
    "spoofed-name-in-upper-case": 'hello("FORBIDDEN.TEST")',
    "spoofed-name-with-a-dot": 'hello("forbidden.test.")',
    "name-above": 'hello("test")',
    "name-below": 'hello("x.allowed.test")',
    "name-with-two-dots": 'hello("allowed.test..")',
    "name-with-a-nul": 'hello("allowed.test\\0.forbidden.test")',
    "name-with-a-port": 'hello("allowed.test:443")',
    "name-with-a-space": 'hello("allowed.test forbidden.test")',
    "name-of-two-hosts": 'hello("allowed.test,forbidden.test")',
    "name-that-is-not-ascii": 'hello("\\xd0\\xb0llowed.test")',
    "name-that-is-an-address": 'hello("127.0.0.3")',
    "name-that-is-empty": 'hello("")',
    "no-name": "records(hello_message())",
    "no-extensions-at-all": 'records(b"\\x01\\0\\0\\x2b\\x03\\x03" + os.urandom(32) + b"\\0\\0\\x02\\x13\\x01\\x01\\0\\0\\0")',
    "two-names-in-one-extension": 'hello("allowed.test", "forbidden.test")',
    "name-of-another-kind": 'records(hello_message(server_names("allowed.test", kind=1)))',
    "the-extension-twice": 'records(hello_message(server_names("allowed.test"), server_names("forbidden.test")))',
    "the-extension-twice-the-other-way": 'records(hello_message(server_names("forbidden.test"), server_names("allowed.test")))',
    "extension-longer-than-its-content": 'records(hello_message(extension(0, b"\\0\\x20\\0\\0\\x0callowed.test")))',
    "bytes-after-the-name": 'records(hello_message(extension(0, b"\\0\\x0f\\0\\0\\x0callowed.test" + b"forbidden.test")))',
    "encrypted-hello": 'records(hello_message(server_names("allowed.test"), extension(0xFE0D, b"\\0" + os.urandom(150))))',
    "encrypted-hello-alone": 'records(hello_message(extension(0xFE0D, b"\\0" + os.urandom(150))))',
    "encrypted-name-of-old": 'records(hello_message(server_names("allowed.test"), extension(0xFFCE, os.urandom(150))))',
    "spoofed-in-small-records": 'records(hello_message(server_names("forbidden.test")), size=7)',
    "spoofed-in-records-of-one-byte": 'records(hello_message(server_names("forbidden.test")), size=1)',
    "two-hellos-in-one-record": 'records(hello_message(server_names("allowed.test")) + hello_message(server_names("forbidden.test")))',
    "a-second-hello-that-begins-in-the-record": 'records(hello_message(server_names("allowed.test")) + b"\\x01\\0")',
    "another-record-amid-the-hello": 'records(hello_message(server_names("allowed.test"))[:50]) + b"\\x14\\x03\\x03\\0\\x01\\x01" + records(hello_message(server_names("forbidden.test")))',
    "empty-record-first": 'b"\\x16\\x03\\x01\\0\\0" + hello("allowed.test")',
    "change-of-cipher-first": 'b"\\x14\\x03\\x03\\0\\x01\\x01" + hello("allowed.test")',
    "alert-first": 'b"\\x15\\x03\\x01\\0\\x02\\x01\\0" + hello("allowed.test")',
    "data-first": 'records(b"smuggled", kind=23) + hello("allowed.test")',
    "heartbeat-first": 'records(b"\\x01\\0\\x01x", kind=24) + hello("allowed.test")',
    "server-hello": 'records(b"\\x02" + hello_message(server_names("allowed.test"))[1:])',
    "record-of-no-version": 'records(hello_message(server_names("allowed.test")), version=b"\\x03\\x09")',
    "datagram-tls": 'records(hello_message(server_names("allowed.test")), version=b"\\xfe\\xfd")',
    "ssl-2-hello": 'b"\\x80\\x2e\\x01\\0\\x02\\0\\x15\\0\\0\\0\\x10" + os.urandom(37)',
    "hello-of-a-megabyte": 'records(hello_message(server_names("allowed.test"), *(extension(1000 + n, bytes(60000)) for n in range(1))) + bytes(1 << 20))',
    "hello-that-says-it-is-huge": 'records(b"\\x01\\xff\\xff\\xff" + hello_message(server_names("allowed.test"))[4:])',
    "hello-cut-short": 'hello("allowed.test")[:-20]',
    "record-longer-than-allowed": 'b"\\x16\\x03\\x01\\x50\\0" + hello_message(server_names("allowed.test")) + bytes(20480)',
}  # fmt: skip


def spoken(made, where):
    """Say a hello through a tunnel."""
    return through(connect(where), eval(made))


@pytest.fixture(scope="module")
def hellos(evader, far):
    where = f"allowed.test:{far.tls}"
    return evader.series(spoken, {name: {"made": made, "where": where} for name, made in HELLOS.items()})


@pytest.mark.parametrize("attempt", HELLOS)
def test_refused(hellos, attempt):
    """The tunnel is opened, since its host is allowed; not a byte goes through it."""
    assert hellos.judged(attempt).evidence.startswith("opened")


def test_refusals_are_in_the_log(hellos):
    """Each once."""
    assert [record.arguments["host"] for record in hellos.refusals] == ["allowed.test"] * len(HELLOS)
    assert {record.result for record in hellos.refusals} <= {"denied_by_policy", "bad_request", "reset"}


@pytest.mark.parametrize(("name", "size"), [("allowed.test", 16384), ("ALLOWED.TEST", 64), ("allowed.test.", 3)])
def test_control_the_right_name_arrives(evader, far, name, size):
    """The same bytes for the right name reach the server, however small the records."""
    made = f"records(hello_message(server_names({name!r})), size={size})"
    outcome = evader.attempt(spoken, made=made, where=f"allowed.test:{far.tls}", passes=True, decided=False)
    assert any(visit.raw[:1] == b"\x16" for visit in outcome.visits)
    assert "forbidden" not in str(outcome.names)


@pytest.mark.parametrize("name", ["forbidden.test", "allowed.test"])
def test_tiny_writes(evader, far, name):
    """The hello comes byte by byte, each in a packet of its own."""

    def attack(where, name):
        return through(connect(where), *(bytes([each]) for each in hello(name)), pause=0.0005)

    allowed = name == "allowed.test"
    outcome = evader.attempt(attack, where=f"allowed.test:{far.tls}", name=name, passes=allowed, decided=not allowed)
    assert bool([visit for visit in outcome.visits if visit.raw]) == allowed


@pytest.mark.parametrize("at", [0, 1, 9, 60, 140])
def test_urgent_byte(evader, far, at):
    """A byte that is there or not, depending on who reads and when: what was checked must be what is sent on."""

    def attack(where, at):
        opened, _ = connect(where)
        whole = hello("forbidden.test")
        with opened:
            if at:
                opened.sendall(whole[:at])
            opened.send(b"\x16", socket.MSG_OOB)
            send(opened, [whole[at:]])
            return rest_of(opened).decode("latin-1")

    evader.attempt(attack, where=f"allowed.test:{far.tls}", at=at)


@pytest.mark.parametrize("name", ["blocked.test", "allowed.test"])
def test_second_hello(evader, far, name):
    """The server asks for another hello, and the second one is for another name. Servers go by the second."""

    def attack(where, name):
        opened, _ = connect(where)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = context.wrap_bio(incoming, outgoing, server_hostname="allowed.test")
        with opened:
            for turn in range(10):
                try:
                    client.do_handshake()
                    done = True
                except ssl.SSLWantReadError:
                    done = False
                except ssl.SSLError as error:
                    return f"TLS failed: {error}"
                data = outgoing.read()
                opened.sendall(data.replace(b"allowed.test", name.encode()) if turn else data)
                if done:
                    return "done"
                if not (data := opened.recv(65536)):
                    return "ended"
                incoming.write(data)
            return "no end"

    allowed = name == "allowed.test"
    outcome = evader.attempt(attack, where=f"allowed.test:{far.retry}", name=name, passes=True, decided=not allowed)
    assert (outcome.evidence == "done") == allowed
    assert outcome.names == ["allowed.test"] * (2 if allowed else 1)


def asked(where, name, protocols=()):
    """A request inside real TLS."""
    return secure(connect(where), name, "GET /control HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", protocols)


@pytest.mark.parametrize("protocols", [(), ("h2",)], ids=["no-protocols", "h2"])
@pytest.mark.parametrize("name", ["forbidden.test", None], ids=["spoofed", "unnamed"])
def test_real_tls_for_another_name(evader, far, name, protocols):
    outcome = evader.attempt(asked, where=f"allowed.test:{far.tls}", name=name, protocols=list(protocols))
    assert outcome.evidence.startswith("TLS failed")


@pytest.mark.parametrize("host", ["allowed.test", "127.0.0.2"])
def test_another_name_by_socks(evader, far, host):
    """The same checks hold whichever way the tunnel was opened."""

    def attack(host, port, name):
        return secure(socks(host, port), name, "GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n")

    outcome = evader.attempt(attack, host=host, port=far.tls, name="forbidden.test")
    assert outcome.evidence.startswith("TLS failed")


@pytest.mark.parametrize("where", ["forbidden.test", "127.0.0.3", "localhost", "127.0.0.1"])
def test_allowed_name_at_another_host(evader, far, where):
    """The name in TLS is allowed, and the tunnel leads elsewhere."""
    outcome = evader.attempt(asked, where=f"{where}:{far.tls}", name="allowed.test")
    assert outcome.evidence.startswith("HTTP/1.1 403 ")


def test_name_at_an_address(evader, far):
    """A tunnel to an allowed address, in which a name is asked for that nobody allowed."""
    outcome = evader.attempt(asked, where=f"127.0.0.2:{far.tls}", name="forbidden.test")
    assert outcome.evidence.startswith("TLS failed")


def test_control_real_tls(evader, neighbour, far):
    """Real TLS for an allowed name works; where the forbidden name is allowed, that works too."""

    def attack(where, name):
        request = f"GET /control HTTP/1.1\r\nHost: {where}\r\nConnection: close\r\n\r\n"
        return secure(connect(where), name, request)

    where = f"allowed.test:{far.tls}"
    outcome = evader.attempt(attack, where=where, name="allowed.test", passes=True, decided=False)
    assert (outcome.names, outcome.targets) == (["allowed.test"], ["/control"])
    assert "welcome" in outcome.evidence
    assert far.token in neighbour.run(attack, where=f"forbidden.test:{far.tls}", name="forbidden.test")
