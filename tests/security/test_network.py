"""Attacks on the network: reach the host or the world, listen in, change interfaces. One address of the sandbox's own
loopback answers: with an allow list the proxy does, without a network the sandbox's supervisor, which refuses."""

import socket

import pytest

from carrel.isolation.sandbox import PROXY_PORT


@pytest.fixture(params=["none", "allowlist"])
def network(request):
    """What the sandbox was started with."""
    return request.param


@pytest.fixture
def attacker(request, attacker, network):
    """As everywhere, on each of these networks."""
    if attacker.setting == "microvm":
        request.getfixturevalue("microvm_networks")
    attacker.network = network
    return attacker


@pytest.fixture
def compared(compared, network):
    """As everywhere, on each of these networks."""
    compared.network = network
    return compared


def test_open_ports(attacker):
    """Find somebody who listens, at any port of any address that is called local."""

    def attack():
        import socket

        found = []
        for host in ("127.0.0.1", "127.0.0.2", "127.255.255.254", "0.0.0.0", "::1", "::ffff:127.0.0.1", "::"):
            # Whoever listens on all addresses holds the port on each; few need to be asked for each.
            ports = range(1, 65536) if host in ("127.0.0.1", "::1") else (22, 53, 80, 443, 1080, 3128, 7070, 8080)
            kind = socket.AF_INET6 if ":" in host else socket.AF_INET
            one = socket.socket(kind)
            for port in ports:  # a socket that was refused can ask again
                if one.connect_ex((host, port)) == 0:
                    if one.getsockname() != one.getpeername():  # itself
                        found.append([host, port])
                    one.close()
                    one = socket.socket(kind)
            one.close()
        return found

    found = attacker.run(attack, timeout=300)  # an emulated machine needs a part of it
    aliases = {"127.0.0.1", "0.0.0.0", "::ffff:127.0.0.1"}  # the last two are names of the first
    assert {tuple(one) for one in found} == {(host, PROXY_PORT) for host in aliases}


def test_bound_sockets(attacker):
    """Find a socket that was left in the sandbox's network."""

    def attack():
        found = []
        for kind in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6", "udplite", "packet", "netlink", "unix"):
            try:
                found += [[kind, line.split()] for line in open(f"/proc/net/{kind}").read().splitlines()[1:]]
            except FileNotFoundError:
                pass
        return found

    found = {(kind, line[1] if kind == "tcp" else line[-1]) for kind, line in attacker.run(attack)}
    beyond = {one for one in found if one[0] not in ("unix", "netlink")}
    assert beyond == {("tcp", f"0100007F:{PROXY_PORT:04X}")}


def test_taking_the_place_of_the_relay(attacker):
    """Listen where the proxy does, to answer other programs in its place, or to have it answered from inside."""

    def attack(port):
        import socket

        from inside import first_that_works

        def listen(host, option):
            one = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            one.setsockopt(socket.SOL_SOCKET, option, 1)
            one.bind((host, port))
            one.listen()
            return True

        return first_that_works(
            *(
                lambda host=host, option=option: listen(host, option)
                for host in ("127.0.0.1", "0.0.0.0", "::ffff:127.0.0.1", "::")
                for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT)
            )
        )

    assert not attacker.run(attack, port=PROXY_PORT)


def test_flooding_the_supervisor_where_it_refuses(attacker):
    """Without a network, hold more connections to the supervisor's refusals than it hears, and send it endless heads.
    With an allow list the same goes to the proxy. Commands still run.
    """

    def attack(port):
        import socket
        import subprocess

        held = []
        for _ in range(1000):
            one = socket.socket()
            one.settimeout(5)
            one.connect(("127.0.0.1", port))
            held.append(one)
        for one in held[:100]:
            try:
                one.sendall(b"A" * 200_000)
            except OSError:
                pass
        return subprocess.run(["echo", "alive"], capture_output=True, text=True).stdout

    assert attacker.run(attack, port=PROXY_PORT) == "alive\n"

    def still_there():
        return "alive"

    assert attacker.run(still_there) == "alive"


def test_tcp_to_the_host(compared):
    """Connect to a service on the host's loopback."""

    def attack(port, token):
        import socket

        with socket.create_connection(("127.0.0.1", port), 5) as one:
            return token in one.recv(100).decode()

    compared.attempt(attack, port=compared.host.tcp, token=compared.host.token)


def test_udp_to_the_host(compared):
    """Send a datagram to a service on the host's loopback."""

    def attack(port, token):
        import socket

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            one.settimeout(2)
            one.connect(("127.0.0.1", port))
            one.send(b"hello")
            return token in one.recv(100).decode()

    compared.attempt(attack, port=compared.host.udp, token=compared.host.token)


def test_abstract_socket_of_the_host(compared):
    """Connect to a Unix socket of the host that has no file."""

    def attack(name, token):
        import socket

        with socket.socket(socket.AF_UNIX) as one:
            one.connect("\0" + name)
            return token in one.recv(100).decode()

    compared.attempt(attack, name=compared.host.abstract, token=compared.host.token)


def test_unix_socket_of_the_host(compared):
    """Connect to a Unix socket of the host by its path."""

    def attack(path, token):
        import socket

        with socket.socket(socket.AF_UNIX) as one:
            one.connect(path)
            return token in one.recv(100).decode()

    compared.attempt(attack, path=compared.host.unix, token=compared.host.token)


def test_abstract_sockets_in_sight(compared):
    """List the Unix sockets of the host."""

    def attack(name):
        return name in open("/proc/net/unix").read()

    compared.attempt(attack, name=compared.host.abstract)


def test_interfaces(attacker):
    """Find an interface that leads out."""

    def attack():
        import socket

        return [name for _index, name in socket.if_nameindex() if name != "lo"] or None

    attacker.attempt(attack)


def test_routes(attacker):
    """Find a route that leads out."""

    def attack():
        routes = open("/proc/net/route").read().splitlines()[1:]
        beyond = [line for line in open("/proc/net/ipv6_route") if line.split()[-1] != "lo"]
        return routes + beyond or None

    attacker.attempt(attack)


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1", "169.254.169.254", "10.0.0.1"])
def test_world_by_tcp(attacker, address):
    """Connect to an address outside, such as the metadata service of a cloud."""

    def attack(address):
        import errno
        import socket

        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as one:
            one.settimeout(5)
            try:
                one.connect((address, 80))
            except TimeoutError:
                return "packets leave: nobody answered"
            except OSError as error:
                return None if error.errno in (errno.ENETUNREACH, errno.EADDRNOTAVAIL) else f"unexpected: {error}"
            return "connected"

    attacker.attempt(attack, address=address)


def test_world_by_udp(attacker):
    """Send a datagram outside."""

    def attack():
        import socket

        from inside import first_that_works

        def send(address):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
                return one.sendto(b"x", (address, 53))

        return first_that_works(
            *(lambda address=address: send(address) for address in ("192.0.2.1", "255.255.255.255", "224.0.0.1"))
        )

    attacker.attempt(attack)


def test_names(attacker):
    """Carry data out in a question for a name."""

    def attack():
        import socket

        try:
            return socket.getaddrinfo("data.example.org", 80)
        except socket.gaierror:
            return None

    attacker.attempt(attack)
    assert attacker.box.commands.run("grep nameserver /etc/resolv.conf").stdout == ""


def test_raw_socket(attacker):
    """Forge packets."""

    def attack():
        import socket

        from inside import first_that_works

        return first_that_works(
            *(
                lambda family=family, protocol=protocol: bool(socket.socket(family, socket.SOCK_RAW, protocol))
                for family in (socket.AF_INET, socket.AF_INET6)
                for protocol in (1, 6, 255)
            )
        )

    attacker.attempt(attack)


def test_packet_socket(attacker):
    """Listen to every packet on the wire."""

    def attack():
        import socket

        from inside import first_that_works

        return first_that_works(
            *(
                lambda kind=kind: bool(socket.socket(socket.AF_PACKET, kind, 3))
                for kind in (socket.SOCK_RAW, socket.SOCK_DGRAM)
            )
        )

    attacker.attempt(attack)


def test_vsock(attacker):
    """Talk to the hypervisor, past every network namespace."""

    def attack():
        import socket

        return bool(socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM))

    attacker.attempt(attack)


@pytest.mark.parametrize(
    "family",
    [
        name
        for name in (
            "AF_ALG",
            "AF_BLUETOOTH",
            "AF_CAN",
            "AF_RDS",
            "AF_TIPC",
            "AF_KEY",
            "AF_QIPCRTR",
            "AF_X25",
            "AF_AX25",
            "AF_IPX",
            "AF_APPLETALK",
        )
        if hasattr(socket, name)
    ],
)
def test_rare_protocols(attacker, family):
    """Reach a seldom used and seldom looked at part of the kernel."""

    def attack(family):
        import socket

        from inside import first_that_works

        return first_that_works(*(lambda kind=kind: bool(socket.socket(family, kind, 0)) for kind in (1, 2, 3, 5)))

    attacker.attempt(attack, family=int(getattr(socket, family)))


@pytest.mark.parametrize("protocol", [33, 132, 136, 262])
def test_rare_transports(attacker, protocol):
    """Have the kernel load a module for DCCP, SCTP, UDP-Lite or MPTCP."""

    def attack(protocol):
        import socket

        from inside import first_that_works

        return first_that_works(
            *(lambda kind=kind: bool(socket.socket(socket.AF_INET, kind, protocol)) for kind in (1, 2, 5, 6))
        )

    attacker.attempt(attack, protocol=protocol)


def test_netlink_families(attacker):
    """Talk to the firewall, to audit or to the kernel's event bus."""

    def attack():
        import socket

        from inside import first_that_works

        families = (4, 6, 9, 12, 15, 16, 19, 21)  # sock_diag, xfrm, audit, netfilter, uevent, generic, ecryptfs, crypto
        return first_that_works(
            *(
                lambda family=family: bool(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, family))
                for family in families
            )
        )

    attacker.attempt(attack)


def test_new_interface(attacker):
    """Make an interface of one's own."""

    def attack():
        import os
        import socket
        import struct

        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as one:
            one.bind((0, 0))
            name = b"carrel0\0"
            kind = struct.pack("HH", 4 + 6, 1) + b"dummy\0" + b"\0\0"
            info = struct.pack("HH", 4 + len(kind), 18) + kind
            body = struct.pack("BxHiII", 0, 0, 0, 0, 0) + struct.pack("HH", 4 + len(name), 3) + name + info
            one.send(struct.pack("IHHII", 16 + len(body), 16, 0x601 | 4, 1, os.getpid()) + body)
            answer = one.recv(4096)
            failed = struct.unpack_from("i", answer, 16)[0]
            return failed == 0

    attacker.attempt(attack)


def test_loopback_down(attacker):
    """Change the state of an interface."""

    def attack():
        import fcntl
        import socket
        import struct

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            fcntl.ioctl(one, 0x8914, struct.pack("16sH14x", b"lo", 0))
        return True

    attacker.attempt(attack)


def test_tunnel_device(attacker):
    """Open a tunnel to the host."""

    def attack():
        import os

        return os.open("/dev/net/tun", os.O_RDWR) >= 0

    attacker.attempt(attack)


def test_other_side_of_the_namespace(attacker):
    """Take a socket of the host's network that the supervisor passed on."""

    def attack():
        import os

        from inside import first_that_works

        own = os.readlink("/proc/self/ns/net")
        pids = [name for name in os.listdir("/proc") if name.isdigit()]
        return first_that_works(*(lambda pid=pid: os.readlink(f"/proc/{pid}/ns/net") != own for pid in pids))

    attacker.attempt(attack)


def test_host_name(attacker):
    """Learn or change the name of the host."""

    def attack(name):
        import socket

        from inside import first_that_works

        def rename():
            socket.sethostname("other")
            return True

        return first_that_works(
            lambda: socket.gethostname() == name,
            lambda: name in open("/proc/sys/kernel/hostname").read().split(),
            rename,
        )

    attacker.attempt(attack, name=socket.gethostname())


def test_nothing_was_reached(attacker):
    """Reach a listener of the host without being noticed: whatever the tests above said, the listeners say so too."""
    before = len(attacker.host.touched)

    def attack(tcp, udp, abstract):
        import socket

        for family, kind, address in (
            (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", tcp)),
            (socket.AF_INET, socket.SOCK_STREAM, ("0.0.0.0", tcp)),
            (socket.AF_INET6, socket.SOCK_STREAM, ("::ffff:127.0.0.1", tcp)),
            (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", udp)),
            (socket.AF_UNIX, socket.SOCK_STREAM, "\0" + abstract),
        ):
            try:
                with socket.socket(family, kind) as one:
                    one.connect(address)
                    one.send(b"x")
            except OSError:
                pass

    attacker.run(attack, tcp=attacker.host.tcp, udp=attacker.host.udp, abstract=attacker.host.abstract)
    assert attacker.host.touched[before:] == []
