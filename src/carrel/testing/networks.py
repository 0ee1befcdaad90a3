"""Checks of the network of a sandbox. They need `bash` inside, which can open connections by itself."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from carrel.models import Network
from carrel.providers import Capability
from carrel.testing.checks import check
from carrel.testing.harness import Harness, Running

_GREETING = b"carrel was reached\n"
_ADDRESS_OF_INTERFACE = 0x8915
_INTERFACES = "cut -d: -f1 /proc/net/dev | tail -n +3 | tr -d ' '"


@asynccontextmanager
async def _listening(address: str) -> AsyncIterator[int]:
    """Start a server on the host that sends a greeting to each client; yield its port."""

    async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(_GREETING)
        writer.close()

    server = await asyncio.start_server(greet, address, 0)
    async with server:
        yield int(server.sockets[0].getsockname()[1])


async def _reaches(box: Running, address: str, port: int) -> bool:
    result = await box.run(["bash", "-c", f"exec 3<>/dev/tcp/{address}/{port} && timeout 5 cat <&3"], timeout=15)
    return result.stdout.encode() == _GREETING


def _outward_address() -> str | None:
    """Return the address of this host for outbound traffic, or None without a route. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _addresses() -> set[str]:
    """Return the addresses of this host, by its interfaces."""
    found = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()))
            except OSError:  # it has none
                continue
            found.add(socket.inet_ntoa(answer[20:24]))
    return found


async def _leads_nowhere(box: Running) -> None:
    """Assert that there is no way out. A platform may give every sandbox an interface; then it must lead nowhere."""
    assert not (await box.run("grep nameserver /etc/resolv.conf")).stdout, "there is a name server"
    if (await box.run(_INTERFACES)).stdout == "lo\n":
        assert not (await box.run("tail -n +2 /proc/net/route")).stdout, "there is a route"
        addresses = {"127.0.0.1"}
    else:
        addresses = _addresses()
    async with _listening("0.0.0.0") as port:
        reached = await asyncio.gather(*(_reaches(box, address, port) for address in sorted(addresses)))
    assert not any(reached), f"{sorted(addresses)}: {reached}"


async def _asks(box: Running, port: int) -> str:
    """Return what a listener in a sandbox answers to a client of a proxy there."""
    ask = f"exec 3<>/dev/tcp/127.0.0.1/{port}; printf 'CONNECT a.example:443 HTTP/1.1\\r\\n\\r\\n' >&3"
    return (await box.run(["bash", "-c", f"{ask}; timeout 10 cat <&3"], timeout=60)).stdout


@check(Capability.NETWORK_NONE)
async def no_network(harness: Harness) -> None:
    """Without a network nothing outside is reached. Of listeners, the proxy refuses everything, and the supervisor
    answers nobody but its server.
    """
    async with harness.sandbox(network=Network.NONE) as box:
        await _leads_nowhere(box)
        sockets = (
            "tail -qn +2 /proc/net/tcp /proc/net/tcp6 /proc/net/udp /proc/net/udp6 | awk '$4 == \"0A\" {print $2}'"
        )
        places = (await box.run(sockets)).stdout.split()
        proxies = [place for place in places if place.startswith("0100007F:")]
        assert len(proxies) <= 1 and len(places) <= 2, places
        for place in places:
            answer = await _asks(box, int(place.rpartition(":")[2], 16))
            assert answer.startswith("HTTP/1.1 403 ") if place in proxies else not answer, (place, answer)
        assert await harness.provider.way_out(box.handle) is None


@check(Capability.NETWORK_ALLOWLIST)
async def allowlist(harness: Harness) -> None:
    """With an allow list, the proxy address of the tools is the only way out, and it leads only to this server."""
    async with harness.sandbox(network=Network.ALLOWLIST) as box, harness.sandbox(network=Network.ALLOWLIST) as other:
        await _leads_nowhere(box)
        ways = [await harness.provider.way_out(one.handle) for one in (box, other)]
        assert None not in ways, "there is no way out"
        mine, others = (socket.socket(fileno=way) for way in ways)
        with mine, others:
            for one in (mine, others):
                one.setblocking(False)
            knock = "exec 3<>/dev/tcp/127.0.0.1/${http_proxy##*:}; echo hello >&3; timeout 10 cat <&3"
            command = await box.start(["bash", "-c", knock])
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(20):
                connection, _ = await loop.sock_accept(mine)
                with connection:
                    connection.setblocking(False)
                    assert await loop.sock_recv(connection, 100) == b"hello\n"
                    await loop.sock_sendall(connection, _GREETING)
            assert (await box.result(command.id)).stdout.encode() == _GREETING
            try:
                others.accept()
            except BlockingIOError:
                return
            raise AssertionError("another sandbox's way out was reached")


@check(Capability.NETWORK_BRIDGE)
async def bridge(harness: Harness) -> None:
    """A bridged network leads out, but not to the host's loopback."""
    async with harness.sandbox(network=Network.BRIDGE) as box:
        assert (await box.run(_INTERFACES)).stdout != "lo\n"
        assert "nameserver" in (await box.run("cat /etc/resolv.conf")).stdout
        gateway = (await box.run("awk '$2 == \"00000000\" {print $3}' /proc/net/route")).stdout.strip()
        assert gateway, "there is no route that leads out"
        async with _listening("127.0.0.1") as port:
            for address in ("127.0.0.1", socket.inet_ntoa(bytes.fromhex(gateway)[::-1])):
                assert not await _reaches(box, address, port), f"the host's loopback is reached by {address}"
        outward = _outward_address()
        if outward is not None:
            async with _listening(outward) as port:
                assert await _reaches(box, outward, port), "nothing outside is reached"


@check(Capability.NETWORK_HOST)
async def host_network(harness: Harness) -> None:
    """The network `host` is the host's own, with its loopback."""
    async with harness.sandbox(network=Network.HOST) as box, _listening("127.0.0.1") as port:
        assert await _reaches(box, "127.0.0.1", port)
